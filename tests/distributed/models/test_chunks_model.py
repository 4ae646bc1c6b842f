"""The chunks of a group (`staging`), explored in every interleaving, over several operations.

Each member has three chunks that it uses in turn, and the only thing that keeps it from writing one that
others still read is that it met them in between.
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
RELAY, REDUCE, BROADCAST, REFUSED = "relay", "reduce", "broadcast", "refused"


@dataclass(frozen=True)
class Group:
    """Operations, each with its number of rounds, and what is done wrong on purpose."""

    operations: tuple[tuple[str, int], ...]
    members: int = 2
    chunks: int = 3
    weak: bool = False
    wrong: str = ""

    def others(self, me: int) -> list[int]:
        """Return the other members."""
        return [m for m in range(self.members) if m != me]

    def explore(self, order: str) -> int:
        """Visit every state; returns how many there are."""
        words = {f"arrive{m}": 0 for m in range(self.members)}
        for m in range(self.members):
            words |= {f"{part}{m}.{i}": 0 for part in ("brought", "result") for i in range(self.chunks)}
        programs = [lambda me=me: context(self, me) for me in range(self.members)]
        return Exploration(programs, words, order).run()


def arrive_and_wait(g: Group, me: int, arrivals: int) -> Program:
    """Arrive and wait for all: `SlotProtocol.meet` and `again`."""
    if g.weak:
        yield fence()
    yield store(f"arrive{me}", arrivals)
    yield fence()
    for m in range(g.members):
        if m != me:
            yield until((f"arrive{m}", arrivals))
    if g.weak and g.wrong != "no fence after meeting":
        yield fence()


def copy_in(g: Group, me: int, place: int, content: int) -> Program:
    """Write this member's chunk: also where results may lie, which is elsewhere in a shorter chunk."""
    yield store(f"brought{me}.{place % g.chunks}", content)
    yield store(f"result{me}.{place % g.chunks}", content)


def copy_out(g: Group, me: int, part: str, place: int, content: int, sources: range) -> Program:
    """Read what others have brought, or their results."""
    for m in sources:
        if m != me:
            yield read(f"{part}{m}.{place % g.chunks}", content)


def context(g: Group, me: int) -> Program:
    """Take part in all operations."""
    position = arrivals = 0
    for i in range(len(g.operations)):
        kind, rounds = g.operations[i]
        brings = kind != BROADCAST or me == 0
        sources = range(1 if kind == BROADCAST else g.members)
        content = 100 * (i + 1)
        if brings:
            yield from copy_in(g, me, position, content)
        arrivals += 1
        yield from arrive_and_wait(g, me, arrivals)
        if kind == REFUSED:
            continue
        for index in range(rounds):
            place, more = position + index, index + 1 < rounds
            if kind == REDUCE:
                yield from copy_out(g, me, "brought", place, content + index, sources)
                yield store(f"result{me}.{place % g.chunks}", RESULT + content + index)
            if more and brings:
                yield from copy_in(g, me, place + 1, content + index + 1)
            if kind != REDUCE:
                yield from copy_out(g, me, "brought", place, content + index, sources)
            if (more or kind == REDUCE) and not (g.wrong == "do not meet again" and index == 0):
                arrivals += 1
                yield from arrive_and_wait(g, me, arrivals)
            if kind == REDUCE:
                yield from copy_out(g, me, "result", place, RESULT + content + index, sources)
        if g.wrong != "count no chunks":
            position += rounds


MIXED = ((RELAY, 2), (REDUCE, 1), (RELAY, 1), (REDUCE, 2), (BROADCAST, 2), (REFUSED, 1), (RELAY, 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "operations",
    [((RELAY, 4),), ((REDUCE, 4),), ((BROADCAST, 4),), MIXED, ((RELAY, 1),) * 4, ((REDUCE, 1),) * 4],
)
def test_no_chunk_is_written_while_it_is_read(order: str, operations: tuple[tuple[str, int], ...]) -> None:
    """In long operations, in many short ones, and in one after the other of different kinds."""
    assert Group(operations, weak=order == "weak").explore(order) > 50


def test_three_members() -> None:
    """With one who is late while two go on."""
    assert Group(((RELAY, 2), (REDUCE, 1)), members=3).explore("sc") > 1000


@pytest.mark.stress
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("order", ["sc", "tso"])
def test_three_members_for_longer(order: str) -> None:
    """As above, with more operations and where stores are seen late."""
    assert Group(((RELAY, 2), (REDUCE, 2), (RELAY, 1)), members=3).explore(order) > 5_000


@pytest.mark.parametrize(
    ("operations", "order", "wrong", "chunks"),
    [
        (((REDUCE, 4),), "sc", "", 2),
        (((RELAY, 4),), "sc", "", 1),
        (((RELAY, 3),), "sc", "do not meet again", 3),
        (((REDUCE, 2),), "sc", "do not meet again", 3),
        (((RELAY, 1), (RELAY, 1)), "sc", "count no chunks", 3),
        (((RELAY, 2),), "weak", "no fence after meeting", 3),
    ],
)
def test_the_model_sees_what_is_done_wrong(
    operations: tuple[tuple[str, int], ...], order: str, wrong: str, chunks: int
) -> None:
    """With fewer chunks, without a meeting, a fence, or counting on, somebody reads what it must not."""
    group = Group(operations, chunks=chunks, weak=order == "weak", wrong=wrong)
    with pytest.raises(WrongError, match=r"reads .* not|is overwritten while"):
        group.explore(order)
