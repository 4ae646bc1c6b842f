"""Ranks that die or are interrupted at every point of every operation (F3, F21)."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import ForkedRankError, PeerFailedError
from nbparallel.session.tasks.task_run import REPEAT_SECONDS
from tests.harness import fault_injection
from tests.harness.ranks import Running, context_of

SIZES = {"8 B": 1, "64 KiB": 8192, "16 MiB": 2 << 20}


@pytest.mark.matrix
@pytest.mark.fault("F3")
@pytest.mark.parametrize("point", [p for p in fault_injection.POINTS if p != "waiting"])
@pytest.mark.parametrize("size", SIZES)
def test_killed_inside_send(outcomes: Any, point: str, size: str) -> None:
    """Kill -9 of a sender at every point: the receiver gets the whole message or PeerFailedError."""

    def work(c: Communicator) -> Any:
        if c.rank == 0:
            while True:
                c.send(np.ones(SIZES[size]), 1)
                assert c.recv(src=1) == "next"
        try:
            while True:
                assert (c.recv(src=0) == 1).all()
                c.send("next", 0)
        except PeerFailedError as error:
            return error.rank
        except LookupError:
            return 0  # its memory went with it, between its last word and our fetch

    found = outcomes(2, work, faults=f"{point}:0:3:kill")
    assert found[0].signal == signal.SIGKILL
    assert found[1].error is None, found
    assert found[1].value == 0


@pytest.mark.slow
@pytest.mark.fault("F21")
@pytest.mark.time_limit(60)
def test_interrupts_at_random_moments(outcomes: Any) -> None:
    """SIGINT at any bytecode leaves no rank in an operation: one raises it, the others are freed."""
    rng = np.random.default_rng(0)
    for _ in range(12):
        moment, victim = rng.uniform(0.03, 0.08), int(rng.integers(3))

        def work(c: Communicator) -> Any:
            x, y = np.ones(10), context_of(c).store.empty(200_000)
            y[...] = 1
            while True:
                c.all_reduce(x, "max")
                c.all_reduce(y, "max")
                c.send(x, (c.rank + 1) % 3)
                c.recv(src=(c.rank - 1) % 3)
                c.barrier()

        next_press = [moment * 1e9]

        def meanwhile(running: Running, next_press: list[float] = next_press, victim: int = victim) -> bool:
            if time.monotonic_ns() - running.started_ns >= next_press[0]:
                os.kill(running.pids[victim], signal.SIGINT)
                # Python drops what is raised in a `__del__`: as the notebook does, again as long as it runs
                next_press[0] += REPEAT_SECONDS * 1e9
            return False

        found = outcomes(3, work, meanwhile=meanwhile)
        assert isinstance(found[victim].error, KeyboardInterrupt), found
        for outcome in found:
            assert outcome.rank == victim or isinstance(outcome.error, PeerFailedError), outcome


def test_after_a_failure_the_epoch_is_void(outcomes: Any) -> None:
    """A failure that the program caught cannot be used on: every operation tells the first cause."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            raise ValueError("first")
        with pytest.raises(PeerFailedError, match="ValueError"):
            c.barrier()
        for call in (lambda: c.send(1, 0), lambda: c.recv(src=0), c.barrier, lambda: c.all_reduce(1)):
            with pytest.raises(PeerFailedError, match=r"until the next cell.*ValueError.*first"):
                call()
        assert c.failed

    assert [type(o.error) for o in outcomes(3, work)] == [ValueError, type(None), type(None)]


@pytest.mark.fault("F64")
def test_a_forked_child_is_inert(ranks: Any) -> None:
    """In a forked child every operation and every wait raises ForkedRankError; the rank itself goes on."""

    def work(c: Communicator) -> None:
        begun = c.irecv(src=1 - c.rank)
        pid = os.fork()
        if pid == 0:
            refused = 0
            calls = (c.barrier, lambda: c.send(1, 0), lambda: c.recv(src=0), lambda: c.all_reduce(1))
            for call in (*calls, begun.wait):
                try:
                    call()
                except ForkedRankError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        assert c.all_reduce(1) == 2
        c.send("x", 1 - c.rank)
        assert begun.result() == "x"

    ranks(2, work)


def test_outside_a_cell(ranks: Any) -> None:
    """Operations work only while a cell runs."""

    def work(c: Communicator) -> None:
        c.barrier()
        c.end_cell(None)
        with pytest.raises(RuntimeError, match="while a cell runs"):
            c.send(1, 0)

    ranks(2, work)
