"""The protocol of slots and done counters, explored in every interleaving of a small model.

One step is one access to a shared word.  The model shows that no reader ever sees another operation's payload
in a slot, and that no state is stuck, for whole-world operations and for groups (where ranks drift apart by
more than one operation); and that without the done counters it *would* go wrong, so that the exploration can
see what it looks for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest


@dataclass(frozen=True)
class Rank:
    """One rank: which operation it is in, at which step, and whom it has waited for or read."""

    operation: int = 0
    step: str = "reuse"
    peer: int = 0


@dataclass(frozen=True)
class World:
    """Every word that others see."""

    ranks: tuple[Rank, ...]
    slots: tuple[tuple[int, ...], ...]
    arrive: tuple[int, ...]
    done: tuple[int, ...]


def put(values: tuple[int, ...], i: int, value: int) -> tuple[int, ...]:
    """Return a tuple with one element changed."""
    return (*values[:i], value, *values[i + 1 :])


def step(world: World, r: int, generations: int, program: list[set[int]], guarded: bool) -> World | None:
    """Return the world after one step of rank `r`; None if it must wait or has finished.

    `program[k]` are the members of operation k; a rank skips operations it is no member of.  Every slot and
    counter is counted in operations of the whole program, as lanes of groups would be.
    """
    rank = world.ranks[r]
    k = rank.operation
    if k >= len(program):
        return None
    members = sorted(program[k])
    if r not in program[k]:
        return advance(world, r, Rank(k + 1))
    others = [m for m in members if m != r]
    if rank.step == "reuse":
        earlier = [j for j in range(k) if j % generations == k % generations and r in program[j]]
        if guarded and any(world.done[m] <= j for j in earlier for m in program[j] if m != r):
            return None
        return advance(world, r, replace(rank, step="write"))
    if rank.step == "write":
        slots = list(world.slots)
        slots[r] = put(slots[r], k % generations, k)
        return advance(replace(world, slots=tuple(slots)), r, replace(rank, step="arrive"))
    if rank.step == "arrive":
        return advance(replace(world, arrive=put(world.arrive, r, k + 1)), r, Rank(k, "wait", 0))
    if rank.step == "wait":
        if rank.peer == len(others):
            return advance(world, r, Rank(k, "read", 0))
        if world.arrive[others[rank.peer]] <= k:
            return None
        return advance(world, r, replace(rank, peer=rank.peer + 1))
    if rank.step == "read":
        if rank.peer == len(others):
            return advance(replace(world, done=put(world.done, r, k + 1)), r, Rank(k + 1))
        seen = world.slots[others[rank.peer]][k % generations]
        assert seen == k, f"rank {r} reads operation {seen} of rank {others[rank.peer]}, is in {k}"
        return advance(world, r, replace(rank, peer=rank.peer + 1))
    raise AssertionError(rank.step)


def advance(world: World, r: int, rank: Rank) -> World:
    """Return the world with one rank's program counter moved."""
    return replace(world, ranks=(*world.ranks[:r], rank, *world.ranks[r + 1 :]))


def explore(n: int, generations: int, program: list[set[int]], *, guarded: bool = True) -> int:
    """Visit every reachable state; returns how many there are."""
    start = World((Rank(),) * n, ((-1,) * generations,) * n, (0,) * n, (0,) * n)
    seen, stack = {start}, [start]
    while stack:
        world = stack.pop()
        following = [w for r in range(n) if (w := step(world, r, generations, program, guarded)) is not None]
        finished = all(rank.operation >= len(program) for rank in world.ranks)
        assert following or finished, f"stuck: {world}"
        for w in following:
            if w not in seen:
                seen.add(w)
                stack.append(w)
    return len(seen)


@pytest.mark.parametrize(("n", "generations"), [(2, 1), (2, 2), (2, 4), (3, 2)])
def test_the_world(n: int, generations: int) -> None:
    """Whole-world collectives never read a slot too late, whatever the interleaving, and never get stuck."""
    assert explore(n, generations, [set(range(n))] * (6 if n == 2 else 4)) > 100


def test_groups_and_late_ranks() -> None:
    """With groups, where one rank may run ahead, the done counters keep slots from being reused too early."""
    program = [{0, 1}, {0, 2}, {0, 2}, {0, 2}, {0, 1, 2}]
    assert explore(3, 2, program) > 1000


def test_the_exploration_sees_the_fault() -> None:
    """Without done counters rotation alone is not safe: one slot in the world, and groups with two."""
    with pytest.raises(AssertionError, match="reads operation"):
        explore(2, 1, [{0, 1}] * 4, guarded=False)
    with pytest.raises(AssertionError, match="reads operation"):
        explore(3, 2, [{0, 1}, {0, 2}, {0, 2}, {0, 2}, {0, 1, 2}], guarded=False)
