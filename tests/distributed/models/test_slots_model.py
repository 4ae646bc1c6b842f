"""The protocol of slots and done counters (`slot_protocol`), explored in every interleaving of a small model.

No reader ever sees another operation's payload in a slot, and nobody waits for ever, for whole-world
operations and for groups (where ranks drift apart by more than one operation); and without the done counters
or a fence it *would* go wrong, so that the exploration can see what it looks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.distributed.models.exploration import (
    ORDERS,
    Exploration,
    Program,
    WrongError,
    fence,
    read,
    store,
    until,
)

GROUPS = ((0, 1), (0, 2), (0, 2), (0, 2), (0, 1, 2))
"""Rank 1 is late while the others go on."""


@dataclass(frozen=True)
class World:
    """Operations, each with its members, and what is done wrong on purpose.

    Every slot and counter is counted in operations of all, as lanes of groups would be.
    """

    ranks: int
    generations: int
    operations: tuple[tuple[int, ...], ...]
    weak: bool = False
    wrong: str = ""

    def explore(self, order: str) -> int:
        """Visit every state; returns how many there are."""
        words = {f"{word}{r}": 0 for word in ("arrive", "done") for r in range(self.ranks)}
        words |= {f"slot{r}.{g}": 0 for r in range(self.ranks) for g in range(self.generations)}
        programs = [lambda r=r: rank(self, r) for r in range(self.ranks)]
        return Exploration(programs, words, order).run()


def rank(w: World, me: int) -> Program:
    """Take part in all operations that this rank is a member of."""
    for k in range(len(w.operations)):
        if me not in w.operations[k]:
            continue
        others = tuple(r for r in w.operations[k] if r != me)
        generation = k % w.generations
        for j in range(k):
            if j % w.generations == generation and me in w.operations[j] and w.wrong != "do not wait":
                for r in w.operations[j]:
                    if r != me:
                        yield until((f"done{r}", j + 1))
        if w.wrong == "arrive before writing":
            yield store(f"arrive{me}", k + 1)
        yield store(f"slot{me}.{generation}", k + 1)
        if w.weak and w.wrong != "no fence before arriving":
            yield fence()
        yield store(f"arrive{me}", k + 1)
        yield fence()
        for i in range(len(others)):
            yield until((f"arrive{others[i]}", k + 1))
            if w.weak and w.wrong != "no fence before reading":
                yield fence()
            yield read(f"slot{others[i]}.{generation}", k + 1)
        if w.weak and w.wrong != "no fence before done":
            yield fence()
        yield store(f"done{me}", k + 1)


def world(ranks: int, generations: int, count: int, order: str, wrong: str = "") -> World:
    """Return operations of all ranks."""
    return World(ranks, generations, (tuple(range(ranks)),) * count, order == "weak", wrong)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("generations", [1, 2, 4])
def test_the_world(order: str, generations: int) -> None:
    """Whole-world collectives never read a slot too late, whatever the interleaving, and never get stuck."""
    assert world(2, generations, 6 if order != "weak" else 3, order).explore(order) > 100


def test_three_ranks() -> None:
    """As above."""
    assert world(3, 2, 4, "sc").explore("sc") > 1000


@pytest.mark.parametrize("order", ["sc", "tso"])
def test_groups_and_late_ranks(order: str) -> None:
    """With groups, where one rank may run ahead, the done counters keep slots from being reused too early."""
    assert World(3, 2, GROUPS).explore(order) > 1000


@pytest.mark.stress
@pytest.mark.time_limit(900)
def test_groups_in_weak_order() -> None:
    """As above, where stores are seen in any order and loads see what was."""
    assert World(3, 1, GROUPS[:3], weak=True).explore("weak") > 10_000


@pytest.mark.parametrize(
    ("w", "order"),
    [
        (world(2, 1, 4, "sc", "do not wait"), "sc"),
        (World(3, 2, GROUPS, wrong="do not wait"), "sc"),
        (world(2, 2, 2, "sc", "arrive before writing"), "sc"),
        (world(2, 2, 2, "weak", "no fence before arriving"), "weak"),
        (world(2, 2, 2, "weak", "no fence before reading"), "weak"),
        (world(2, 1, 2, "weak", "no fence before done"), "weak"),
    ],
)
def test_the_exploration_sees_the_fault(w: World, order: str) -> None:
    """Without done counters rotation alone is not safe: one slot in the world, and groups with two."""
    with pytest.raises(WrongError, match=r"reads .* not|is overwritten while"):
        w.explore(order)
