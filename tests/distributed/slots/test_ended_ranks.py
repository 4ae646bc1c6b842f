"""A rank that finished the cell or raised: those who wait for it are told, and why (F31)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveMismatchError, DeadlockError, PeerFailedError


@pytest.mark.matrix(cover=())
@pytest.mark.fault("F31")
@pytest.mark.parametrize("n", [2, 4])
def test_a_forgotten_call(outcomes: Any, n: int) -> None:
    """A rank that finished the cell is named to those who wait in a collective, in 0.3 s."""

    def work(c: Communicator) -> float:
        c.barrier()
        begin = time.monotonic()
        if c.rank == n - 1:
            return 0.0
        with pytest.raises(CollectiveMismatchError, match=rf"(?s)rank {n - 1} finished the cell.*all_reduce"):
            c.all_reduce(np.ones(3))
        with pytest.raises(CollectiveMismatchError, match="until the next cell"):
            c.barrier()
        return time.monotonic() - begin

    for outcome in outcomes(n, work):
        assert outcome.error is None, outcome
        assert outcome.value < 0.3 * 3  # three times the promise: other processes share this machine


def test_a_source_that_finished(outcomes: Any) -> None:
    """Recv from a rank that has finished the cell is a deadlock that names it, and what did arrive."""

    def work(c: Communicator) -> None:
        if c.rank == 1:
            c.send(1, 0, tag=5)
            return
        with pytest.raises(DeadlockError, match=r"rank 1 finished the cell.*tag 5 from rank 1"):
            c.recv(src=1)

    for outcome in outcomes(2, work):
        assert outcome.error is None, outcome


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F30")
@pytest.mark.parametrize("n", [2, 4])
def test_an_exception_frees_everybody(outcomes: Any, n: int) -> None:
    """An exception on one rank frees all who wait, whatever in, within 0.2 s, and tells its type and line."""
    waits: list[Callable[[Communicator, int], Any]] = [
        lambda c, origin: c.barrier(),
        lambda c, origin: c.all_reduce(np.ones(3)),
        lambda c, origin: c.all_reduce(np.ones(300_000)),
        lambda c, origin: c.broadcast(None, src=origin),
        lambda c, origin: c.recv(src=origin),
        lambda c, origin: c.recv(),
        lambda c, origin: c.reduce(np.ones(300_000), (origin + 1) % n),
        lambda c, origin: c.all_gather("x" * 100_000),
        lambda c, origin: c.gather(np.ones(300_000), dst=(origin + 1) % n),
        lambda c, origin: c.scatter(None, src=origin),
        lambda c, origin: c.reduce_scatter(np.ones(300_000)),
        lambda c, origin: c.all_to_all([1] * n),
        lambda c, origin: (
            c.all_reduce(1, group=c.new_group([0, n - 1])) if c.rank in (0, n - 1) else c.recv()
        ),
    ]
    for wait, origin in itertools.product(waits, (0, n - 1)):

        def work(c: Communicator, wait: Any = wait, origin: int = origin) -> None:
            if c.rank == origin:
                time.sleep(0.02)
                raise ZeroDivisionError("division by zero")
            wait(c, origin)

        found = outcomes(n, work)
        for outcome in found:
            if outcome.rank == origin:
                assert isinstance(outcome.error, ZeroDivisionError)
                continue
            assert isinstance(outcome.error, PeerFailedError), outcome
            assert outcome.error.rank == origin
            assert "ZeroDivisionError on line" in str(outcome.error)
            assert outcome.error_ns - found[origin].error_ns < 5 * 0.2e9  # a busy machine


def test_the_root_cause_wins(outcomes: Any) -> None:
    """Ranks that only follow a failure do not hide it: everybody names the first."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            raise KeyError("first")
        if c.rank == 1:
            c.recv(src=0)
        time.sleep(0.3)
        c.barrier()

    for outcome in outcomes(4, work)[1:]:
        assert isinstance(outcome.error, PeerFailedError)
        assert outcome.error.rank == 0
        assert "KeyError" in str(outcome.error)
