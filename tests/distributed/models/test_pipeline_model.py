"""The steps of a scan (`StagingBuffers.scan`, `Pipeline`), explored in every interleaving of a small model.

A member reads the piece that the one below has left, complete and not yet overwritten; no member waits for
ever; and the next operation finds the places free that it takes before its own arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.distributed.models.exploration import (
    ORDERS,
    Exploration,
    Program,
    WrongError,
    announce,
    fence,
    read,
    store,
    until,
)


@dataclass(frozen=True)
class Scan:
    """Members, pieces and places, and what is done wrong on purpose; two scans one after the other."""

    members: int
    pieces: int
    places: int = 3
    weak: bool = False
    wrong: str = ""
    times: int = 2

    def explore(self, order: str) -> int:
        """Visit every state; returns how many there are."""
        words = {f"arrive{r}": 0 for r in range(self.members)}
        words |= {f"place{r}.{p}": 0 for r in range(self.members) for p in range(self.places)}
        programs = [lambda r=r: member(self, r) for r in range(self.members)]
        return Exploration(programs, words, order).run()


def member(w: Scan, me: int) -> Program:
    """Take part in the scans."""
    last = w.members - 1
    begun = position = 0
    for _ in range(w.times):
        if me == 0:
            yield store(f"place0.{position % w.places}", position + 1)
        begun += 1
        yield from announce(w, f"arrive{me}", begun, "a step")
        for r in range(w.members):
            if r != me:
                yield until((f"arrive{r}", begun))
        if w.weak:
            yield fence()
        if me > 1:
            yield from announce(w, f"arrive{me}", begun + me - 1, "a step")
        for piece in range(0 if me else 1, w.pieces):
            step = me + piece
            if me < last and piece >= w.places and w.wrong != "do not wait for the one above":
                yield until((f"arrive{me + 1}", begun + step - 2))
                if w.weak:
                    yield fence()
            if me:
                if w.wrong != "do not wait for the one below":
                    yield until((f"arrive{me - 1}", begun + step - 1))
                    if w.weak and w.wrong != "no fence before reading":
                        yield fence()
                yield read(f"place{me - 1}.{(position + step - 1) % w.places}", position + step)
            if me < last:
                yield store(f"place{me}.{(position + step) % w.places}", position + step + 1)
            yield from announce(w, f"arrive{me}", begun + step, "a step")
        yield from announce(w, f"arrive{me}", begun + w.pieces + last - 1, "a step")
        if me < last and w.wrong != "do not wait at the end":
            yield until((f"arrive{me + 1}", begun + me + w.pieces))
        begun += w.pieces + last - 1
        position += w.pieces + last


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_two_members(order: str, pieces: int) -> None:
    """A few pieces, and more than there are places."""
    assert Scan(2, min(pieces, 4) if order == "weak" else pieces, weak=order == "weak").explore(order) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("members", "pieces"), [(3, 1), (3, 5), (4, 2)])
def test_more_members(members: int, pieces: int) -> None:
    """Members in the middle wait for both sides."""
    assert Scan(members, pieces).explore("sc") > 100


@pytest.mark.parametrize(
    ("w", "order"),
    [
        (Scan(2, 5, wrong="do not wait for the one above"), "sc"),
        (Scan(2, 2, wrong="do not wait for the one below"), "sc"),
        (Scan(2, 3, wrong="do not wait at the end"), "sc"),
        (Scan(2, 2, weak=True, wrong="no fence before a step", times=1), "weak"),
        (Scan(2, 2, weak=True, wrong="no fence before reading", times=1), "weak"),
    ],
)
def test_the_exploration_sees_the_fault(w: Scan, order: str) -> None:
    """Without one of the waits or fences a piece is read too early, or overwritten while it is read."""
    with pytest.raises(WrongError, match=r"reads .* not|is overwritten while"):
        w.explore(order)
