"""F4: who dies in the middle of a change of shared words stops nobody; there are no locks to be held."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import PeerFailedError
from nbparallel.wire import control
from nbparallel.wire.control_layout import LEFT
from tests.distributed.runtime.test_stopped import stopped

pytestmark = pytest.mark.fault("F4")


def die_within(nth: int, what: int) -> None:
    """Make this process signal itself at the nth time that it is between the words of a shared record."""
    seen = 0

    def between() -> None:
        nonlocal seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), what)

    control.order_stores = between


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_killed_while_it_changes_its_slot(outcomes: Any, nth: int) -> None:
    """A rank killed between two words of its slot: the others, who read it, are freed and say who died."""

    def work(c: Communicator) -> Any:
        x = np.ones(20_000)
        if c.rank == 1:
            die_within(nth, signal.SIGKILL)
        try:
            while True:
                if c.rank == 0:
                    time.sleep(0.02)  # so that rank 1 sleeps, and says in its slot what it waits for
                c.all_reduce(x, "max")
                c.recv(src=0) if c.rank else [c.send(1, 1), c.send(1, 2)]
        except PeerFailedError as error:
            return error.rank, str(error), time.monotonic_ns()

    found = outcomes(3, work)
    assert found[1].signal == signal.SIGKILL
    for outcome in (found[0], found[2]):
        assert outcome.error is None, outcome
        rank, text, ended = outcome.value
        assert rank == 1
        assert "SIGKILL" in text
        assert ended - found[1].death_ns < 5 * 0.2e9  # five times the promise: this machine is shared


@pytest.mark.slow
def test_stopped_while_it_changes_its_slot(outcomes: Any) -> None:
    """A rank stopped between two words counts as computing: nobody is told of a deadlock, and all go on."""

    def work(c: Communicator) -> int:
        if c.rank == 1:
            die_within(2, signal.SIGSTOP)
        for i in range(30):
            if c.rank == 0:
                time.sleep(0.01)
            assert c.all_reduce(i) == 2 * i
        return 30

    def meanwhile(running: Any) -> bool:
        if not stopped(running, 1):
            return False
        time.sleep(0.7)  # several looks for a deadlock
        os.kill(running.pids[1], signal.SIGCONT)
        return True

    assert [outcome.value for outcome in outcomes(2, work, meanwhile=meanwhile)] == [30, 30]


@pytest.mark.slow
def test_nobody_is_held_up_by_a_stopped_one(outcomes: Any) -> None:
    """Who reads the slot of a rank that is stopped between two words can be interrupted meanwhile."""
    pressed: list[float] = []

    def work(c: Communicator) -> None:
        if c.rank == 1:
            die_within(2, signal.SIGSTOP)
        while True:
            if c.rank == 0:
                time.sleep(0.01)
            c.barrier()

    def meanwhile(running: Any) -> bool:
        if not pressed and stopped(running, 1):
            time.sleep(0.5)  # rank 0 has looked for a deadlock by now
            os.kill(running.pids[0], signal.SIGINT)
            pressed.append(time.monotonic())
        if not pressed or not running.view.words[running.view.word(0, LEFT)]:
            return False
        assert stopped(running, 1)
        os.kill(running.pids[1], signal.SIGCONT)
        return True

    found = outcomes(2, work, meanwhile=meanwhile)
    assert [type(outcome.error) for outcome in found] == [KeyboardInterrupt, PeerFailedError], found
