"""Where a rank's time has gone: from what it has published so far, and from its notes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nbparallel.session.results import RankTimes
from nbparallel.session.tasks.outcomes import times_now, times_of
from nbparallel.wire import control
from nbparallel.wire.control import ControlView, Operation, State
from nbparallel.wire.control_layout import (
    SLOT,
    TIMING,
    TIMING_AS_OF,
    TIMING_CELL,
    TIMING_INSIDE,
    TIMING_INSIDE_WAIT,
    TIMING_MOVING,
    TIMING_OPERATIONS,
    TIMING_UNCOUNTED,
    TIMING_WAIT,
)
from nbparallel.wire.timeline import RankTimeline

CELL, MS = 9, 1_000_000


class Published:
    """What one rank says of itself, at times in milliseconds since the cell began."""

    def __init__(self, view: ControlView) -> None:
        self.view = view

    def slot(self, state: State, since: int, cell: int = CELL) -> None:
        """Write the state slot."""
        self.view.write_slot(0, cell, state, Operation.recv)
        self.view.words[self.view.layout.rank_word(0, SLOT) + 8] = since * MS

    def timing(self, cell: int = CELL, **words: int) -> None:
        """Write words of the timing record."""
        first = self.view.word(0, TIMING)
        self.view.words[first + TIMING_CELL] = cell
        places = {
            "wait": TIMING_WAIT, "as_of": TIMING_AS_OF, "moving": TIMING_MOVING, "begin": TIMING_INSIDE,
            "inside": TIMING_INSIDE_WAIT,
        }  # fmt: skip
        for name, value in words.items():
            self.view.words[first + places[name]] = value * MS & ~0xFF

    def times(self, now: int, **options: bool) -> tuple[int, int, int, int]:
        """Return computing, waiting, moving, finished in milliseconds."""
        found = times_now(self.view, 0, CELL, 0, now * MS, **options)
        assert found.whole_ns == (found.finished_ns or now * MS)
        parts = found.computing_ns, found.waiting_ns, found.moving_ns, found.finished_ns
        return tuple(round(part / MS) for part in parts)  # type: ignore[return-value]


@pytest.fixture
def rank() -> Iterator[Published]:
    """Return a rank of its own."""
    fd = control.create(1, 1)
    try:
        with ControlView(fd) as view:
            yield Published(view)
    finally:
        os.close(fd)


def test_a_cell_that_has_not_reached_the_rank(rank: Published) -> None:
    """What it published of an earlier one does not count."""
    rank.slot(State.FINISHED, 1, cell=8)
    rank.timing(8, wait=500, moving=300)
    assert rank.times(10) == (10, 0, 0, 0)


def test_a_wait_that_goes_on(rank: Published) -> None:
    """It counts up to now, and what was published of it in between does not count twice."""
    rank.timing(wait=100, as_of=120, moving=30)
    rank.slot(State.WAITING, 400)
    assert rank.times(1000) == (270, 700, 30, 0)
    rank.timing(wait=500, as_of=800)  # it ended just now: the slot is about to say so
    assert rank.times(801) == (270, 501, 30, 0)
    rank.slot(State.COMPUTING, 801)
    assert rank.times(1000) == (470, 500, 30, 0)


def test_an_operation_that_goes_on(rank: Published) -> None:
    """What it does not wait is moving."""
    rank.timing(wait=100, as_of=300, moving=50, begin=400, inside=77)  # 77: of the one before
    rank.slot(State.COMPUTING, 350)
    assert rank.times(1000) == (250, 100, 650, 0)
    rank.timing(wait=300, as_of=700, inside=200)
    assert rank.times(1000) == (250, 300, 450, 0)
    rank.slot(State.WAITING, 900)
    assert rank.times(1000) == (250, 400, 350, 0)


def test_a_rank_that_has_ended(rank: Published) -> None:
    """Its time stands still; that of one that died ends with it, also in the middle of a wait."""
    rank.timing(wait=100, as_of=120, moving=50)
    rank.slot(State.FINISHED, 600)
    assert rank.times(5000) == (450, 100, 50, 600)
    rank.slot(State.WAITING, 600)
    assert rank.times(1000, died=True) == (450, 500, 50, 1000)


def test_operations_are_exact_or_unknown(rank: Published) -> None:
    """While short ones run uncounted there is no number."""
    first = rank.view.word(0, TIMING)
    rank.timing()
    rank.slot(State.COMPUTING, 1)
    rank.view.words[first + TIMING_OPERATIONS] = 7
    assert times_now(rank.view, 0, CELL, 0, MS).operations == 7
    rank.view.words[first + TIMING_UNCOUNTED] = 1
    assert times_now(rank.view, 0, CELL, 0, MS).operations is None


def test_notes() -> None:
    """A rank's time is from the sending of the cell to its end, whatever was noted one by one."""
    notes = RankTimeline(
        0, 1, 5, 100, noted_from_ns=5, operations=900, omitted=900, wait_ns=30, moving_ns=20, noted=(),
        statements=(),
    )  # fmt: skip
    assert times_of(notes, 0) == RankTimes(50, 30, 20, 100, 900)
