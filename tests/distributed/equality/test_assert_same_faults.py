"""`assert_same` when a rank calls something else, dies, comes late or writes meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.equality.difference import CHUNK
from nbparallel.errors import (
    CollectiveMismatchError,
    PeerFailedError,
)
from tests.distributed.equality.test_assert_same import message
from tests.harness.ranks import context_of, wrap_collectives


def test_somebody_does_something_else(ranks: Any, outcomes: Any) -> None:
    """Another operation on a rank, or none, is a mismatch that names assert_same."""

    def other(c: Communicator) -> None:
        c.assert_same(1) if c.rank else c.all_reduce(1)

    for outcome in outcomes(2, other):
        assert isinstance(outcome.error, CollectiveMismatchError)
        assert "assert_same" in str(outcome.error)

    def none(c: Communicator) -> None:
        if c.rank:
            c.assert_same(1)

    with pytest.raises(CollectiveMismatchError, match="rank 0 finished the cell without calling assert_same"):
        ranks(2, none)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(5))
def test_a_rank_dies_while_it_looks(outcomes: Any, step: int) -> None:
    """A rank that is killed in any step of the comparison frees the others, who say so."""

    def work(c: Communicator) -> None:
        x = np.zeros(3 * CHUNK // 8)
        x[::1000] = c.rank
        if c.rank == 1:
            count = iter(range(100))

            def dying(run: Callable[..., Any], *args: Any) -> Any:
                if next(count) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return run(*args)

            wrap_collectives(c, dying)
        c.assert_same(x)

    for outcome in outcomes(3, work):
        if outcome.rank == 1:
            assert outcome.signal == signal.SIGKILL
        else:
            assert isinstance(outcome.error, PeerFailedError)
            assert outcome.error.rank == 1


def test_somebody_writes_meanwhile(ranks: Any) -> None:
    """Data that change while they are compared give an error or silence, never a wait or a crash."""

    def work(c: Communicator) -> int:
        shared = c.broadcast(context_of(c).store.share(np.zeros(300_000)) if c.rank == 0 else None, view=True)
        if c.rank == 0:
            stop = threading.Event()

            def write() -> None:
                while not stop.is_set():
                    shared[:] += 1

            thread = threading.Thread(target=write)
            thread.start()
        try:
            return sum(bool(message(c, shared)) for _ in range(10))
        finally:
            if c.rank == 0:
                stop.set()
                thread.join()

    assert len(set(ranks(2, work))) == 1
