"""isend, irecv and their works."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator, P2POp, isend
from nbparallel.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    StaleWorkError,
)
from nbparallel.wire.control import State
from tests.harness.ranks import context_of


def test_the_order_of_receives(ranks: Any) -> None:
    """Receives are served in the order in which they were begun; a later blocking one comes after them."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            works = [c.irecv(src=1) for _ in range(50)]
            anybody = c.irecv(tag=9)
            time.sleep(0.3)  # all have arrived, and nothing has looked at them
            assert c.recv(src=1) == 50
            assert [w.result() for w in reversed(works)] == list(range(49, -1, -1))
            c.barrier()
            assert anybody.result() == "late"
            assert anybody.source_rank() == 2
        else:
            if c.rank == 1:
                for i in range(51):
                    c.isend(i, 0)
            c.barrier()
            if c.rank == 2:
                c.isend("late", 0, tag=9)

    ranks(3, work)


def test_progress_in_other_waits(ranks: Any) -> None:
    """A receive is served while its rank waits in something else, and can be asked without waiting."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            buffer = np.zeros(3)
            w = c.irecv(buffer, src=1)
            assert not w.is_completed()
            assert "under way" in repr(w)
            c.barrier()
            c.barrier()
            assert (buffer == 7).all(), "not before it was asked"
            assert w.is_completed()
            assert w.result() is buffer
            with pytest.raises(CollectiveTimeoutError, match="rank 1"):
                c.irecv(src=1, tag=5).wait(timeout=0.05)
            c.barrier()
        else:
            c.barrier()
            c.isend(np.full(3, 7.0), 0)
            time.sleep(0.3)
            c.barrier()
            c.barrier()

    ranks(2, work)


def test_errors_come_when_waited_for(ranks: Any) -> None:
    """A message that does not fit raises in wait, and is still there; wrong arguments raise at once."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            buffer = np.zeros(3)
            w = c.irecv(buffer, src=1)
            for _ in range(2):
                with pytest.raises(CollectiveMismatchError, match="does not fit"):
                    w.wait()
            assert isinstance(w.exception(), CollectiveMismatchError)
            assert (buffer == 0).all()
            assert c.recv(src=1).shape == (4,)
        else:
            c.send(np.ones(4), 0)
        for call, error in (
            (lambda: c.isend(1, 7), ValueError),
            (lambda: c.irecv(src=-1), ValueError),
            (lambda: c.irecv(0), TypeError),
            (lambda: c.batch_isend_irecv([1]), TypeError),  # type: ignore[list-item]
            (lambda: P2POp(print, 1, 0), ValueError),
            (lambda: P2POp(isend, 1), ValueError),
        ):
            with pytest.raises(error):
                call()
        c.barrier()

    ranks(2, work)


class SlowlyRebuilt:
    """Takes longer to receive than two looks for a deadlock are apart."""

    def __reduce__(self) -> Any:
        return time.sleep, (0.7,)


@pytest.mark.parametrize("slow", ["value", "rank"])
def test_a_receive_that_takes_long_is_no_deadlock(ranks: Any, slow: str) -> None:
    """A rank that receives while it waits for something else is not stuck, also for the value's sender."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            w = c.irecv(src=1)
            context, progress = context_of(c), context_of(c).progress
            if slow == "rank":  # as if it were stopped before it looks at what has come
                context.progress = lambda: (time.sleep(0.7), progress())
        c.barrier()
        if c.rank == 1:
            c.strict_sync(True)
            c.send(SlowlyRebuilt() if slow == "value" else 1, 0)
            c.strict_sync(False)
        c.barrier()
        if c.rank == 0:
            context.progress = progress
            w.wait()

    ranks(2, work)


def test_a_deadlock_after_a_message_that_does_not_fit(outcomes: Any) -> None:
    """A rank whose posted receive fails inside of a wait still waits, and is found stuck."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            c.irecv(np.zeros(3), src=1)
            c.barrier()
        while context_of(c).view.read_slot(0).state is not State.WAITING:
            time.sleep(0.01)
        c.send(np.zeros(4), 0)
        c.recv(src=0)

    assert {type(outcome.error) for outcome in outcomes(2, work, seconds=8)} == {DeadlockError}


@pytest.mark.fault("F34")
def test_strict_sync(outcomes: Any) -> None:
    """With strict_sync an isend is completed by its receive; waiting first on both sides is a deadlock."""

    def work(c: Communicator) -> None:
        c.strict_sync(True)
        other = 1 - c.rank
        w = c.isend(1, other)
        assert c.recv(src=other) == 1
        w.wait()
        with pytest.raises(DeadlockError):
            c.isend(2, other).wait()

    for outcome in outcomes(2, work):
        assert outcome.error is None, outcome


@pytest.mark.fault("F36")
def test_the_end_of_a_cell(ranks: Any) -> None:
    """Work that nobody waited for is told with its line; in the next cell it says that it is stale."""

    def work(c: Communicator) -> None:
        line = work.__code__.co_firstlineno
        w, asked = c.irecv(src=1 - c.rank, tag=4), c.irecv(src=1 - c.rank)
        c.isend(1, 1 - c.rank)
        assert asked.result() == 1
        c.barrier()
        c.end_cell(None)
        assert c.forgotten == [f"irecv(src={1 - c.rank}, tag=4) on line {line + 2} was not waited for"]
        c.begin_cell(2, (0, 1), work.__code__.co_filename)
        c.barrier()
        for _ in range(2):
            with pytest.raises(StaleWorkError, match="ended since"):
                w.wait()
        assert asked.wait()
        c.send("new", 1 - c.rank, tag=4)
        assert c.recv(src=1 - c.rank, tag=4) == "new"
        c.barrier()

    ranks(2, work)


def test_values_go_with_their_works(ranks: Any) -> None:
    """A work that was waited for and dropped keeps nothing alive until the cell ends."""

    def work(c: Communicator) -> None:
        c.isend(np.ones(100_000), 0)
        w = c.irecv(src=0)
        value = weakref.ref(w.result())
        assert value() is not None
        del w
        gc.collect()
        assert value() is None

    ranks(1, work)
