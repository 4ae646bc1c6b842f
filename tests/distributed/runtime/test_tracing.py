"""Ranks note when their operations began and ended, bounded, and the quickest ones pay nothing for it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator, tracing
from nbparallel.sharing import Store
from nbparallel.wire import control
from nbparallel.wire.control import State
from nbparallel.wire.messages import RankTimeline
from tests.harness.ranks import context_of, parts_of


@contextlib.contextmanager
def a_world_of_one() -> Iterator[control.ControlView]:
    """Make a control segment for one rank in this process."""
    fd = control.create(1, 1)
    try:
        with contextlib.closing(control.ControlView(fd)) as view:
            yield view
    finally:
        os.close(fd)


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """Return the communicator of a world of one, in this process, in a cell that is noted."""
    with a_world_of_one() as view:
        communicator = Communicator(view, 0, 1, Store(1), epoch=1, usable_cpus=1)
        communicator.record()
        communicator.begin_cell(1, (0,), __file__)
        yield communicator
        communicator.end_cell(None)
        communicator.close()


def noted(c: Communicator, work: Callable[[], object]) -> RankTimeline:
    """Note what `work` does on a rank."""
    c.record()
    tracer = parts_of(c).tracer
    assert tracer is not None
    tracer.begin()
    work()
    tracer.end()
    notes = c.timeline()
    assert notes is not None
    return notes


def test_operations_of_two_ranks_can_be_compared(ranks: Any) -> None:
    """Name, line, bytes, peer and group are noted, and who was waited for, by one clock."""

    def work(c: Communicator) -> RankTimeline:
        x = np.ones(1 << 17)

        def cell() -> None:
            while c.rank == 1 and context_of(c).view.read_slot(0).state is not State.WAITING:
                time.sleep(0.01)
            time.sleep(0.2 * c.rank)
            c.all_reduce(x)
            c.send(x, 1) if c.rank == 0 else c.recv(src=0)
            c.all_gather(c.rank, group=c.new_group([0, 1], tag="mine"))

        return noted(c, cell)

    first, second = ranks(2, work)
    for notes in (first, second):
        spans = notes.spans()
        assert [span.name for span in spans][::2] == ["all_reduce", "all_gather"]
        assert all(notes.began_ns <= s.begin_ns <= s.end_ns <= notes.ended_ns for s in spans)
        assert all(0 <= span.wait_ns <= span.end_ns - span.begin_ns for span in spans)
        assert [span.line for span in spans] == sorted({span.line for span in spans})
        assert [span.nbytes for span in spans[:2]] == [1 << 20, 1 << 20]
        assert spans[2].group == (0, 1)
        assert notes.omitted == 0
    sent, received = first.spans()[1], second.spans()[1]
    assert (sent.name, sent.peer, sent.number) == ("send", 1, 0)
    assert (received.name, received.peer) == ("recv", 0)
    early, late = first.spans()[0], second.spans()[0]
    assert early.number == late.number > 0
    assert early.awaited in (1, -1)  # -1: it never slept, and only their notes together tell
    assert early.begin_ns < late.begin_ns < early.end_ns
    assert early.wait_ns > 0.5 * (late.begin_ns - early.begin_ns)


def test_the_quickest_ones_are_left_alone(alone: Communicator) -> None:
    """After `SHORT` short operations in a statement the class's own method is called; they are counted.

    Their time is estimated: it is no computing.
    """
    for _ in range(1000):
        alone.barrier()
    assert not set(tracing.QUICK) & set(vars(alone))
    alone.at_line(2)
    assert set(tracing.QUICK) <= set(vars(alone))
    for _ in range(1000):
        alone.barrier()
    alone.end_cell(None)
    notes = alone.timeline()
    assert notes is not None
    # on a busy machine an operation that was interrupted is no short one
    assert 2 * tracing.SHORT <= len(notes.spans()) < 1000
    assert notes.omitted == 2000 - len(notes.spans())
    assert (
        notes.ended_ns - notes.began_ns
        >= notes.moving_ns
        > 3 * sum(ns for span in notes.spans() if (ns := span.end_ns - span.begin_ns) < tracing.SHORT_NS)
    )
    assert [line for line, _ in notes.statements] == [2]


def test_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many operations the last are kept, with the time from which on all are there."""
    monkeypatch.setattr(tracing, "KEPT", 10)
    with a_world_of_one() as view:
        c = Communicator(view, 0, 1, Store(1), epoch=1, usable_cpus=1)
        c.record()
        c.begin_cell(1, (0,), __file__)
        for i in range(25):
            c.all_gather(i)
        c.end_cell(None)
        notes = c.timeline()
        assert notes is not None
        spans = notes.spans()
        assert (len(spans), notes.omitted) == (10, 15)
        assert notes.noted_from_ns == spans[0].begin_ns > notes.began_ns
        c.begin_cell(2, (0,), __file__)
        c.end_cell(None)
        empty = c.timeline()
        assert empty is not None
        assert (empty.spans(), empty.omitted, empty.noted_from_ns) == ((), 0, empty.began_ns)
        c.close()


def test_errors_are_noted(alone: Communicator) -> None:
    """An operation that raises is noted as one that failed, whatever was passed for a rank."""
    for rank in (10**30, -3, "one", []):
        with pytest.raises((ValueError, TypeError)):
            alone.send(1, rank)  # type: ignore[arg-type]
    alone.barrier()
    alone.end_cell(None)
    notes = alone.timeline()
    assert notes is not None
    assert [(span.failed, span.peer) for span in notes.spans()] == [(True, -1)] * 4 + [(False, -1)]


def test_an_operation_made_of_others_counts_once(alone: Communicator) -> None:
    """What an operation calls to do its work is not noted a second time."""
    alone.all_gather_object([None], 3)
    alone.monitored_barrier()
    alone.end_cell(None)
    notes = alone.timeline()
    assert notes is not None
    assert [span.name for span in notes.spans()] == ["all_gather_object", "monitored_barrier"]
