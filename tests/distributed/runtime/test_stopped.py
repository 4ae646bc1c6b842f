"""Ranks that are stopped inside operations, and clocks that jump: exact results, time-outs in time."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveTimeoutError, DeadlockError
from tests.harness import fault_injection
from tests.harness.ranks import Running, context_of

SIZES = {"8 B": 1, "64 KiB": 8192, "16 MiB": 2 << 20}


def stopped(running: Running, rank: int) -> bool:
    """Whether the process of a rank is stopped."""
    with open(f"/proc/{running.pids[rank]}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F60")
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("size", SIZES)
def test_stopped_at_every_point(outcomes: Any, size: str) -> None:
    """SIGSTOP at each fault point, then SIGCONT: nobody is called dead, and every value is exact."""
    for turn, point in enumerate(fault_injection.POINTS):
        victim, shared = turn % 2, bool(turn % 3)

        def work(c: Communicator, shared: bool = shared, victim: int = victim) -> int:
            make = context_of(c).store.empty if shared else np.empty
            x = make(SIZES[size])
            for i in range(4):
                if c.rank != victim:
                    time.sleep(0.02)  # else nobody would pass the point "waiting"
                x[...] = i + c.rank
                c.all_reduce(x)
                assert (x == 2 * i + 1).all(), (i, x[0])
                c.barrier()
                c.send(x, 1 - c.rank)
                assert (c.recv(src=1 - c.rank) == 2 * i + 1).all()
            return 4

        def meanwhile(running: Running, victim: int = victim) -> bool:
            if not stopped(running, victim):
                return False
            time.sleep(0.15)
            os.kill(running.pids[victim], signal.SIGCONT)
            return True

        found = outcomes(2, work, faults=f"{point}:{victim}:2:stop", meanwhile=meanwhile, seconds=300)
        assert [outcome.value for outcome in found] == [4, 4], (point, found)


@pytest.mark.fault("F60")
def test_a_stopped_rank_can_be_killed(outcomes: Any) -> None:
    """SIGKILL of a rank that is stopped inside an operation frees the others like any other death."""

    def work(c: Communicator) -> None:
        x = np.ones(8192)
        while True:
            c.all_reduce(x, "max")

    def meanwhile(running: Running) -> bool:
        if not stopped(running, 1):
            return False
        os.kill(running.pids[1], signal.SIGKILL)
        return True

    found = outcomes(3, work, faults="half_payload:1:3:stop", meanwhile=meanwhile)
    assert found[1].signal == signal.SIGKILL
    assert {type(found[r].error).__name__ for r in (0, 2)} == {"PeerFailedError"}, found


@pytest.mark.slow
@pytest.mark.fault("F60")
def test_who_acts_on_what_came_does_not_wait_any_more(outcomes: Any) -> None:
    """A rank that computes, or is stopped, after it waited is no part of a deadlock."""

    def work(c: Communicator) -> int:
        if c.rank == 0:
            time.sleep(0.1)  # rank 1 sleeps in its wait by now
            c.send("go", 1)
            return int(c.recv(src=1))
        assert c.recv(src=0) == "go"
        time.sleep(1.0)  # rank 0 looks several times
        c.send(7, 0)
        return 7

    assert [outcome.value for outcome in outcomes(2, work)] == [7, 7]


@pytest.mark.slow
@pytest.mark.fault("F63")
@pytest.mark.time_limit(600)
def test_clocks_that_jump(outcomes: Any) -> None:
    """While the wall clock jumps by hours, time-outs and deadlock reports come when they are due."""

    def work(c: Communicator) -> tuple[float, str]:
        real = time.time
        time.time = lambda: real() + random.choice((-3600, 0, 3600))  # type: ignore[method-assign]
        time.time_ns = lambda: int(time.time() * 1e9)  # type: ignore[method-assign]
        for i in range(200):
            assert c.all_reduce(i) == 2 * i
        c.barrier()
        begin = time.monotonic()
        if c.rank == 0:
            with pytest.raises(CollectiveTimeoutError):
                c.recv(src=1, timeout=0.6)
        else:
            time.sleep(1.2)
        seconds = time.monotonic() - begin
        try:
            c.recv(src=1 - c.rank)
        except DeadlockError as error:
            return seconds, str(error)
        return seconds, ""

    found = [outcome.value for outcome in outcomes(2, work, seconds=300)]
    assert 0.6 <= found[0][0] < 30
    assert all(" waits in recv" in text for _, text in found)
