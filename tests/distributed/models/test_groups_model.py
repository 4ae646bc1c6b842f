"""How groups meet, explored in every interleaving of a small model: areas, introductions, deadlocks.

One step is one access to a shared word or one message.  Every group has slots and counters of its own; its
first member makes them in its first operation there and tells the others, who wait for that.  The model shows
for correct programs that no reader sees another operation's payload, that no state is stuck, and that nobody
who looks at the words at any moment sees a deadlock; and for wrong ones that every state in which nothing
moves any more is seen as one, by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

Program = dict[int, list[frozenset[int]]]
"""For each rank the groups whose next operation it calls, in order."""


@dataclass(frozen=True)
class Rank:
    """Where one rank is: in which call, at which step of it, and at which peer."""

    call: int = 0
    step: str = "begin"
    peer: int = 0


@dataclass(frozen=True)
class World:
    """Every word that others see; keys are (group, member)."""

    ranks: tuple[Rank, ...]
    told: frozenset[tuple[frozenset[int], int]] = frozenset()
    arrive: tuple[tuple[tuple[frozenset[int], int], int], ...] = ()
    done: tuple[tuple[tuple[frozenset[int], int], int], ...] = ()
    slots: tuple[tuple[tuple[frozenset[int], int, int], int], ...] = ()


def get(words: tuple, key: tuple) -> int:
    """Return a word; all are zero at first."""
    return dict(words).get(key, 0)


def put(words: tuple, key: tuple, value: int) -> tuple:
    """Return the words with one changed."""
    return tuple(sorted((dict(words) | {key: value}).items(), key=repr))


def number(program: Program, r: int, call: int) -> int:
    """Return the number of a call among those of its group, from 1."""
    return program[r][: call + 1].count(program[r][call])


def step(world: World, r: int, program: Program, generations: int, *, guarded: bool) -> World | None:
    """Return the world after one step of rank `r`; None if it must wait or has finished."""
    rank = world.ranks[r]
    if rank.call >= len(program[r]):
        return None
    group, k = program[r][rank.call], number(program, r, rank.call)
    others = sorted(group - {r})
    at_end = rank.peer == len(others)

    def to(next_step: str, peer: int = 0, **words: object) -> World:
        moved = Rank(rank.call + 1) if next_step == "leave" else Rank(rank.call, next_step, peer)
        ranks = (*world.ranks[:r], moved, *world.ranks[r + 1 :])
        return replace(world, ranks=ranks, **words)  # type: ignore[arg-type]

    if rank.step == "begin":
        if k > 1:
            return to("reuse")
        return to("tell") if r == min(group) else to("meet")
    if rank.step == "tell":  # a buffered message to each of the others
        if at_end:
            return to("reuse")
        return to("tell", rank.peer + 1, told=world.told | {(group, others[rank.peer])})
    if rank.step == "meet":
        return to("reuse") if (group, r) in world.told else None
    if rank.step == "reuse":
        if guarded and any(get(world.done, (group, m)) < k - generations for m in others):
            return None
        return to("write")
    if rank.step == "write":
        return to("announce", slots=put(world.slots, (group, r, k % generations), k))
    if rank.step == "announce":
        return to("wait", arrive=put(world.arrive, (group, r), k))
    if rank.step == "wait":
        if at_end:
            return to("read")
        return to("wait", rank.peer + 1) if get(world.arrive, (group, others[rank.peer])) >= k else None
    if at_end:
        return to("leave", done=put(world.done, (group, r), k))
    seen = get(world.slots, (group, others[rank.peer], k % generations))
    assert seen == k, f"rank {r} reads operation {seen} of rank {others[rank.peer]}, is in {k}"
    return to("read", rank.peer + 1)


def stuck(world: World, program: Program) -> set[int]:
    """Return who can never go on, as `deadlock.stuck_ranks` finds it from slots and words alone."""
    waiting: dict[int, set[int]] = {}
    finished = {r for r in program if world.ranks[r].call >= len(program[r])}
    for r in set(program) - finished:
        rank = world.ranks[r]
        group, k = program[r][rank.call], number(program, r, rank.call)
        if rank.step == "meet" and (group, r) not in world.told:
            waiting[r] = {min(group)}
        if rank.step == "wait":  # its slot says so until it goes on, even if all are there already
            missing = {m for m in group if get(world.arrive, (group, m)) < k}
            if missing:
                waiting[r] = missing
    while True:
        hopeless = set(waiting) | finished
        free = [r for r, missing in waiting.items() if not missing & hopeless]
        if not free:
            return set(waiting)
        for r in free:
            del waiting[r]


def states(program: Program, generations: int = 2, *, guarded: bool = True) -> Iterator[tuple[World, bool]]:
    """Yield every reachable state, and whether something can still move."""
    start = World((Rank(),) * len(program))
    seen, stack = {start}, [start]
    while stack:
        world = stack.pop()
        following = [w for r in program if (w := step(world, r, program, generations, guarded=guarded))]
        yield world, bool(following)
        for w in following:
            if w not in seen:
                seen.add(w)
                stack.append(w)


def everybody_of(*groups: set[int], n: int) -> Program:
    """Return the program in which every member calls these groups' operations in this order."""
    return {r: [frozenset(g) for g in groups if r in g] for r in range(n)}


CORRECT = [
    everybody_of({0, 1}, {0, 1}, {0, 1}, {0, 1}, n=2),
    everybody_of({0, 1}, {1, 2}, {0, 2}, n=3),
    everybody_of({0, 1, 2}, {1, 2}, {0, 1}, n=3),
    everybody_of({0, 1}, {0, 1}, {0, 1}, {1, 2}, n=3),
]
WRONG = [
    # Two groups in different order; a rank that calls one operation fewer; a circle of three pairs.
    {0: [frozenset({0, 1}), frozenset({0, 1, 2})], 1: [frozenset({0, 1, 2})], 2: [frozenset({0, 1, 2})]},
    {0: [frozenset({0, 1})] * 2, 1: [frozenset({0, 1})]},
    {0: [frozenset({0, 1})], 1: [frozenset({1, 2})], 2: [frozenset({0, 2})]},
]


@pytest.mark.parametrize("program", CORRECT)
def test_correct_programs_always_go_on(program: Program) -> None:
    """No stuck state, no payload of another operation, and no moment at which a deadlock is seen."""
    count = 0
    for world, moves in states(program):
        count += 1
        assert not stuck(world, program) or not moves, world
        finished = all(world.ranks[r].call >= len(program[r]) for r in program)
        assert moves or finished, f"stuck: {world}"
    assert count > 100


@pytest.mark.parametrize("program", WRONG)
def test_wrong_programs_are_seen(program: Program) -> None:
    """Wherever nothing moves any more, everybody who has not finished is seen to be stuck."""
    ends = 0
    for world, moves in states(program):
        lost = {r for r in program if world.ranks[r].call < len(program[r])}
        if not moves:
            ends += 1
            assert stuck(world, program) == lost != set(), world
    assert ends > 0


def test_the_exploration_sees_the_fault() -> None:
    """Without done counters the only slot of a member would be used again too early; with them it is not."""
    program = everybody_of({0, 1, 2}, {0, 1}, {0, 1, 2}, n=3)
    with pytest.raises(AssertionError, match="reads operation"):
        for _ in states(program, 1, guarded=False):
            pass
    assert sum(1 for _ in states(program, 1)) > 100
