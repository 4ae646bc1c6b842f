"""The buffers that ranks keep (`direct.KeptBuffer`), explored in every interleaving, over several operations.

Each member has one buffer of two halves, and the only thing that keeps it from writing what others still read
is that it met them in between.
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

RESULT = 1000
REDUCE, SCATTER, BROADCAST, REFUSED = "reduce", "scatter", "broadcast", "refused"


@dataclass(frozen=True)
class Group:
    """Operations, each with its number of pieces, and what is done wrong on purpose."""

    operations: tuple[tuple[str, int], ...]
    members: int = 2
    weak: bool = False
    wrong: str = ""

    def explore(self, order: str) -> int:
        """Visit every state; returns how many there are."""
        words = {f"arrive{m}": 0 for m in range(self.members)}
        words |= {f"slice{m}.{i}": 0 for m in range(self.members) for i in range(max(2, self.members))}
        programs = [lambda me=me: context(self, me) for me in range(self.members)]
        return Exploration(programs, words, order).run()


def arrive_and_wait(g: Group, me: int, arrivals: int) -> Program:
    """Arrive and wait for all: `SlotProtocol.arrive_and_wait` and `synchronize`."""
    if g.weak:
        yield fence()
    yield store(f"arrive{me}", arrivals)
    yield fence()
    for m in range(g.members):
        if m != me:
            yield until((f"arrive{m}", arrivals))
    if g.weak and g.wrong != "no fence after meeting":
        yield fence()


def copy_in(g: Group, me: int, slices: range, content: int) -> Program:
    """Write slices of this member's buffer."""
    for i in slices:
        yield store(f"slice{me}.{i}", content)


def context(g: Group, me: int) -> Program:
    """Take part in all operations."""
    arrivals, members = 0, range(g.members)
    for i in range(len(g.operations)):
        kind, pieces = g.operations[i]
        content = 100 * (i + 1)
        halves = kind == BROADCAST
        if not halves:
            yield from copy_in(g, me, members, content)
        elif me == 0:
            yield from copy_in(g, me, range(2), content)
        arrivals += 1
        yield from arrive_and_wait(g, me, arrivals)
        if kind == REFUSED:
            continue
        for piece in range(pieces):
            value = content + (piece // 2 if halves else piece)
            if halves and me:
                yield read(f"slice0.{piece % 2}", value)
            elif halves and piece:
                yield store(f"slice0.{(piece + 1) % 2}", content + (piece + 1) // 2)
            if not halves:
                if piece:
                    yield from copy_in(g, me, members, value)
                    arrivals += 1
                    yield from arrive_and_wait(g, me, arrivals)
                for m in members:
                    yield read(f"slice{m}.{me}", value)
                for m in members if kind == REDUCE else ():
                    yield store(f"slice{m}.{me}", RESULT + value)
            if not (g.wrong == "do not meet again" and piece == 0):
                arrivals += 1
                yield from arrive_and_wait(g, me, arrivals)
            for m in members if kind == REDUCE else ():
                yield read(f"slice{me}.{m}", RESULT + value)


MIXED = ((REDUCE, 1), (SCATTER, 2), (BROADCAST, 3), (REFUSED, 1), (REDUCE, 2))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "operations",
    [((SCATTER, 3),), ((REDUCE, 3),), ((BROADCAST, 4),), MIXED, ((BROADCAST, 1),) * 4, ((REDUCE, 1),) * 3],
)
def test_nothing_is_written_while_it_is_read(order: str, operations: tuple[tuple[str, int], ...]) -> None:
    """In long operations, in many short ones, and in one after the other of different kinds."""
    assert Group(operations, weak=order == "weak").explore(order) > 50


def test_three_members() -> None:
    """With one who is late while two go on."""
    assert Group(((SCATTER, 1), (BROADCAST, 2), (REDUCE, 1)), members=3).explore("sc") > 1000


@pytest.mark.parametrize(
    ("operations", "order", "wrong"),
    [
        (((SCATTER, 2),), "sc", "do not meet again"),
        (((REDUCE, 2),), "sc", "do not meet again"),
        (((BROADCAST, 3),), "sc", "do not meet again"),
        (((BROADCAST, 1), (BROADCAST, 1)), "sc", "do not meet again"),
        (((SCATTER, 2),), "weak", "no fence after meeting"),
    ],
)
def test_the_model_sees_what_is_done_wrong(
    operations: tuple[tuple[str, int], ...], order: str, wrong: str
) -> None:
    """Without a meeting or a fence somebody reads what it must not."""
    with pytest.raises(WrongError, match=r"reads .* not|is overwritten while"):
        Group(operations, weak=order == "weak", wrong=wrong).explore(order)
