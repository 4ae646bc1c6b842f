"""What may go wrong with a collective that ends later: every rank is told, none hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import (
    CollectiveMismatchError,
    DeadlockError,
    PeerFailedError,
)
from nbparallel.testing.waiting import wait_until


@pytest.mark.slow
@pytest.mark.fault("F31")
@pytest.mark.fault("F34")
def test_waiting_in_vain(outcomes: Any) -> None:
    """A work that another rank never begins is told: that rank finished, or waits for this one."""

    def finished(c: Communicator) -> str:
        if c.rank == 1:
            return ""
        w = c.all_reduce(1, async_op=True)
        with pytest.raises(CollectiveMismatchError, match="rank 1 finished the cell"):
            w.wait()
        return "told"

    assert [o.value for o in outcomes(2, finished)] == ["told", ""]

    def circle(c: Communicator) -> str:
        w = c.all_reduce(1, async_op=True) if c.rank == 0 else None
        with pytest.raises(DeadlockError) as error:
            w.wait() if w is not None else c.recv(src=0)
        return str(error.value)

    for outcome in outcomes(2, circle):
        assert outcome.error is None, outcome
        assert "rank 0 waits in all_reduce for rank 1" in outcome.value
        assert "rank 1 waits in recv(src=0) for rank 0" in outcome.value

    def forgotten(c: Communicator) -> None:
        if c.rank == 0:
            c.all_reduce(1, async_op=True)  # the end of the cell waits for the other, who never comes

    found = outcomes(2, forgotten)
    assert isinstance(found[0].error, CollectiveMismatchError), found
    assert found[1].error is None


@pytest.mark.fault("F3")
@pytest.mark.parametrize("end", ["finishes", "dies", "fails"])
def test_asking_again_and_again(outcomes: Any, end: str) -> None:
    """Who only asks is told as well when the other one finished, died or failed."""

    def work(c: Communicator) -> list[str]:
        if c.rank == 1:
            time.sleep(0.1)
            if end == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "fails":
                raise ZeroDivisionError
            return []
        works = [c.irecv(src=1)] if c.rank == 0 else [c.all_reduce(1, async_op=True)]
        try:
            wait_until(works[0].is_completed)
        except (PeerFailedError, DeadlockError, CollectiveMismatchError) as error:
            return [str(error)]
        return ["completed"]

    found = outcomes(3, work)
    for outcome in (found[0], found[2]):
        assert outcome.error is None, outcome
        # Whoever looks first says what it sees; the other may hear it from there, when rank 0 has ended too.
        assert re.search("rank 1|ranks 0-1", outcome.value[0]), outcome


def test_wrong_arguments_hurt_only_the_caller(ranks: Any) -> None:
    """They raise at once, as without async_op, and nothing was begun."""

    def work(c: Communicator) -> None:
        x = np.ones(2)
        for call, error in (
            (lambda: c.all_reduce(x, "summ", async_op=True), ValueError),
            (lambda: c.all_reduce("x", async_op=True), TypeError),
            (lambda: c.scan(np.broadcast_to(1.0, (2,)), async_op=True), ValueError),
            (lambda: c.exscan("x", async_op=True), TypeError),
            (lambda: c.maxloc(1j, async_op=True), TypeError),
            (lambda: c.all_reduce(np.broadcast_to(1.0, (2,)), async_op=True), ValueError),
            (lambda: c.all_gather(x, view=True, async_op=True), ValueError),
            (lambda: c.scatter([1], src=c.rank, async_op=True), ValueError),
            (lambda: c.reduce_scatter(np.ones(3), [x, x], async_op=True), ValueError),
        ):
            with pytest.raises(error):
                call()
        assert c.all_reduce(1, async_op=True).result() == 2

    ranks(2, work)
