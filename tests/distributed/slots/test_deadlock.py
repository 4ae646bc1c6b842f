"""Deadlocks are found and explained on every rank; slow and stopped ranks are no deadlock (F34)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveTimeoutError, DeadlockError

pytestmark = pytest.mark.fault("F34")


def explain(call: Callable[[], Any]) -> tuple[str, float]:
    """Return the deadlock's text and how long it took to be found."""
    begin = time.monotonic()
    try:
        call()
    except DeadlockError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("n", [2, 3, 4])
def test_cycles(outcomes: Any, n: int) -> None:
    """A cycle of receives is told on every rank in it: who waits for whom, on which line, within 2 s."""

    def work(c: Communicator) -> Any:
        return explain(lambda: c.recv(src=(c.rank + 1) % n))

    line = work.__code__.co_firstlineno + 1
    for outcome in outcomes(n, work):
        text, seconds = outcome.value
        for rank in range(n):
            peer = (rank + 1) % n
            assert f"rank {rank} waits in recv(src={peer}) for rank {peer} (line {line})" in text
        assert text.endswith("all of these wait to receive: one has to send first, or each uses sendrecv")
        assert seconds < 2


@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.parametrize("kind", ["barrier", "all_reduce", "any", "tag", "rest"])
def test_mixed(outcomes: Any, kind: str) -> None:
    """Collectives against receives, any-source, wrong tags, and ranks that depend on the cycle."""

    def work(c: Communicator) -> Any:
        if kind == "tag":
            c.send(1, 1 - c.rank, tag=1)
            return explain(lambda: c.recv(src=1 - c.rank, tag=2))
        if c.rank == 0:
            return explain(c.barrier if kind == "barrier" else lambda: c.all_reduce(1))
        if kind == "any":
            return explain(c.recv)
        if kind == "rest" and c.rank == 2:
            return explain(lambda: c.recv(src=1))
        return explain(lambda: c.recv(src=0))

    n = 3 if kind == "rest" else 2
    for outcome in outcomes(n, work):
        assert outcome.error is None, outcome
        assert outcome.value[0].startswith("rank 0 waits in"), outcome
        assert "has to send first" not in outcome.value[0], outcome
        assert outcome.value[1] < 2


def test_a_finished_rank_in_the_chain(outcomes: Any) -> None:
    """A rank that can only be helped by one that is itself lost is told, too."""

    def work(c: Communicator) -> Any:
        if c.rank == 2:
            return ("", 0.0)
        return explain(lambda: c.recv(src=c.rank + 1))

    texts = [outcome.value for outcome in outcomes(3, work)]
    assert "rank 2 finished the cell" in texts[1][0]
    assert not any("has to send first" in text for text, _ in texts)
    assert "rank 1 waits in recv(src=2)" in texts[0][0]


@pytest.mark.slow
def test_a_deadline_is_no_edge(outcomes: Any) -> None:
    """A wait that ends by itself makes no deadlock."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            with pytest.raises(TimeoutError):
                c.recv(src=1, timeout=1.0)
            c.send(1, 1)
        else:
            c.recv(src=0)

    for outcome in outcomes(2, work):
        assert outcome.error is None, outcome


@pytest.mark.parametrize("size", [1, 2])
def test_waiting_for_oneself_with_a_timeout_is_no_deadlock(ranks: Any, size: int) -> None:
    """It runs out as any other wait, and the message that is sent afterwards is taken."""

    def work(c: Communicator) -> None:
        begun = c.irecv(src=c.rank)
        for wait in (lambda: begun.wait(0.05), lambda: c.recv(src=c.rank, tag=1, timeout=0.05)):
            with pytest.raises(CollectiveTimeoutError, match=f"rank {c.rank} did not arrive"):
                wait()
        c.send("late", c.rank)
        assert begun.wait()
        assert begun.result() == "late"
        if c.world_size == 1:
            with pytest.raises(CollectiveTimeoutError, match="rank 0 did not arrive"):
                c.recv(timeout=0.05)
            with pytest.raises(DeadlockError, match="for itself"):
                c.recv(src=0)

    ranks(size, work)
