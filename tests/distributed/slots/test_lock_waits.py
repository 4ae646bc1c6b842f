"""Waits for a lock end: by a deadlock that is seen, or by a time-out that names the holder."""

from __future__ import annotations

import time
from typing import Any

import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveTimeoutError, DeadlockError
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.control import Operation
from tests.distributed.slots.lock_states import waits
from tests.harness.ranks import context_of


@pytest.mark.slow
@pytest.mark.fault("F34")
def test_a_holder_that_waits_for_a_waiter_is_a_deadlock(outcomes: Any) -> None:
    """Found within two seconds on both, with the lines of the lock and of the call; a third rank goes on."""

    def work(c: Communicator) -> tuple[str, float]:
        pair = c.new_group([0, 1])
        begin = time.monotonic()
        if c.rank == 2:
            return "", 0.0
        try:
            if c.rank == 0:
                with dist.lock("a'b"):
                    c.barrier(pair)
            wait_until(lambda: waits(c, 0, Operation.new_group) or waits(c, 0, Operation.barrier))
            with dist.lock("a'b"):
                c.barrier(pair)
        except DeadlockError as error:
            return str(error), time.monotonic() - begin
        return "", 0.0

    line = work.__code__.co_firstlineno
    found = outcomes(3, work)
    for outcome in found[:2]:
        assert outcome.error is None, outcome
        text, seconds = outcome.value
        held = f'rank 1 waits in lock("a\'b") (line {line + 10}), which rank 0 holds since line {line + 7}'
        assert held in text
        assert "rank 0 waits in" in text
        assert seconds < 2.5


@pytest.mark.fault("F34")
def test_two_locks_in_different_order_are_a_deadlock(outcomes: Any) -> None:
    """Each rank holds what the other wants: both raise, though the first that does releases its lock."""

    def work(c: Communicator) -> str:
        mine, other = ("a", "b") if c.rank == 0 else ("b", "a")
        try:
            with dist.lock(mine):
                c.barrier()
                with dist.lock(other):
                    return ""
        except DeadlockError as error:
            assert not context_of(c).view.read_locks(c.rank)
            return str(error)

    for outcome in outcomes(2, work):
        assert outcome.error is None, outcome
        assert "rank 0 waits in lock('b')" in outcome.value
        assert "rank 1 waits in lock('a')" in outcome.value


@pytest.mark.slow
@pytest.mark.fault("F34")
def test_a_slow_holder_is_no_deadlock(ranks: Any) -> None:
    """A rank that computes with the lock held is waited for, by several ranks in a row."""

    def work(c: Communicator) -> None:
        with dist.lock("slow"):
            time.sleep(0.5)

    ranks(3, work)


def test_a_time_out_names_the_holder(ranks: Any) -> None:
    """It leaves the queue, so that ranks behind it are not kept; and the next call works."""

    def work(c: Communicator) -> None:
        first = dist.lock("t")
        line = 0
        if c.rank == 0:
            line = work.__code__.co_firstlineno + 5
            with first:
                c.send(line, 1)
                c.send(line, 2)
                c.recv(src=1)
        elif c.rank == 1:
            line = c.recv(src=0)
            for seconds in (0, 0.1):
                with pytest.raises(CollectiveTimeoutError, match=rf"rank 0 holds it since line {line}"):
                    dist.lock("t", timeout=seconds).acquire()
                assert not context_of(c).view.read_locks(1)
            wait_until(lambda: waits(c, 2))
            with pytest.raises(CollectiveTimeoutError, match="rank 0 holds it"):
                dist.lock("t", timeout=0.2).acquire()
            c.send("go", 0)
            with first:
                pass
        else:
            c.recv(src=0)
            with first:
                pass
        c.barrier()

    ranks(3, work)
