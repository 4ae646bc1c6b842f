"""Locks whose holder dies, fails or is interrupted: who gets them next, and who is told."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from typing import Any

import numpy as np
import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator
from nbparallel.errors import PeerFailedError
from nbparallel.testing.waiting import wait_until
from nbparallel.wire import control, control_layout
from nbparallel.wire.control import ControlView, Operation, State
from nbparallel.wire.control_layout import ABANDONED_ENTRIES, DEATH, FAILED, AbandonedLock, keep_locks
from tests.distributed.slots.lock_states import numbers, waits
from tests.harness.ranks import Running, context_of


@pytest.mark.fault("F39")
def test_a_dead_holder_in_a_cell_that_stops(outcomes: Any) -> None:
    """The ranks that wait raise PeerFailedError in time, and the lock stays abandoned for the next epoch."""

    def work(c: Communicator) -> Any:
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: waits(c, 1) and waits(c, 2))
                os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        if c.rank == 3:  # it comes when no rank waits any more, and may not get the lock either
            wait_until(lambda: bool(context_of(c).words[context_of(c).view.word(0, DEATH)]))
            wait_until(lambda: not any(context_of(c).view.read_locks(r) for r in (1, 2)))
        try:
            dist.lock("x").acquire()
        except PeerFailedError as error:
            abandoned = context_of(c).view.abandoned_locks()
            return error.rank, time.monotonic_ns(), [(lock.rank, lock.line) for lock in abandoned]
        return None

    found = outcomes(4, work)
    line = work.__code__.co_firstlineno + 2
    for outcome in found[1:]:
        assert outcome.error is None, outcome
        rank, ended, abandoned = outcome.value
        assert (rank, abandoned) == (0, [(0, line)])
        assert ended - found[0].death_ns < 1e9


def test_a_dead_rank_that_only_waited_abandons_nothing(outcomes: Any) -> None:
    """Its place in the queue is skipped, and no rank is warned."""

    def work(c: Communicator) -> Any:
        context_of(c).cell.go_on = True
        if c.rank == 2:
            wait_until(lambda: waits(c, 1))
            os.kill(c.recv(src=1, tag=1), signal.SIGKILL)
            with dist.lock("x") as lock:
                return lock.abandoned
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: waits(c, 1))
                wait_until(lambda: bool(context_of(c).words[context_of(c).view.word(1, DEATH)]))
                wait_until(lambda: waits(c, 2))
            return ()
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        c.send(os.getpid(), 2, tag=1)
        dist.lock("x").acquire()
        return None

    found = outcomes(3, work)
    assert found[1].signal == signal.SIGKILL
    assert [found[r].value for r in (0, 2)] == [(), ()], found


def test_a_warning_made_an_error_releases_the_lock(outcomes: Any) -> None:
    """With such a filter the next holder raises instead, and does not hold it."""

    def work(c: Communicator) -> Any:
        context_of(c).cell.go_on = True
        if c.rank == 0:
            dist.lock("x").acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: bool(context_of(c).words[context_of(c).view.word(0, DEATH)]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="half changed"):
                dist.lock("x").acquire()
            return dist.lock("x").acquire()

    found = outcomes(2, work)
    assert (found[1].error, found[1].value) == (None, True), found


@pytest.mark.fault("F21")
def test_interrupted_while_it_waits(outcomes: Any) -> None:
    """KeyboardInterrupt there; it leaves the queue, and the holder's next operation raises."""

    def work(c: Communicator) -> Any:
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: bool(context_of(c).words[context_of(c).view.word(1, FAILED)]))
                assert not context_of(c).view.read_locks(1)
            c.barrier()
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        dist.lock("x").acquire()
        return None

    def meanwhile(running: Running) -> bool:
        record = running.view.read_slot(1)
        if record.operation is not Operation.lock or record.state is not State.WAITING:
            return False
        os.kill(running.pids[1], signal.SIGINT)
        return True

    found = outcomes(2, work, meanwhile=meanwhile)
    assert isinstance(found[1].error, KeyboardInterrupt), found
    assert isinstance(found[0].error, PeerFailedError), found


@pytest.mark.fault("F21")
def test_an_exception_inside_releases_it(outcomes: Any) -> None:
    """With the cell going on the next rank gets the lock, without a warning: its holder could repair."""

    def work(c: Communicator) -> Any:
        context_of(c).cell.go_on = True
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: waits(c, 1))
                raise ValueError("mine")
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        with dist.lock("x") as lock:
            return lock.abandoned

    found = outcomes(2, work)
    assert isinstance(found[0].error, ValueError)
    assert (found[1].error, found[1].value) == (None, ()), found


@pytest.mark.slow
@pytest.mark.fault("F39")
@pytest.mark.time_limit(120)
def test_holders_killed_at_random_moments(outcomes: Any) -> None:
    """The others go on counting, whoever dies wherever: one holder at a time, and no wait without an end."""
    rng = np.random.default_rng(5)
    for _ in range(15):
        shared = numbers()
        moment, victim = float(rng.uniform(0.0, 0.05)), int(rng.integers(3))

        def work(c: Communicator, shared: Any = shared) -> int:
            context_of(c).cell.go_on = True
            warnings.simplefilter("ignore")
            end = time.monotonic() + 0.15
            while True:
                with dist.lock("x"):
                    shared[0] = c.rank
                    shared[1 + c.rank] += 1
                    assert shared[0] == c.rank
                if time.monotonic() > end:
                    return int(shared[1 + c.rank])

        def meanwhile(running: Running, moment: float = moment, victim: int = victim) -> bool:
            if time.monotonic_ns() - running.started_ns < moment * 1e9:
                return False
            os.kill(running.pids[victim], signal.SIGKILL)
            return True

        for outcome in outcomes(3, work, meanwhile=meanwhile):
            assert outcome.error is None, outcome
            assert outcome.signal == signal.SIGKILL or outcome.value > 0
            assert outcome.signal is None or outcome.rank == victim


def test_the_newest_abandoned_locks_are_carried_over() -> None:
    """As many as the next epoch has room for; nothing is written behind that."""
    fd = control.create(3, 1)
    with contextlib.closing(ControlView(fd)) as view:
        os.close(fd)
        keep_locks(view.words, [AbandonedLock(n, 0, 0, 0) for n in range(1, 200)])
        assert [lock.name for lock in view.abandoned_locks()] == [*range(200 - ABANDONED_ENTRIES, 200)]
        assert view.words[control_layout.ABANDONED] == ABANDONED_ENTRIES
