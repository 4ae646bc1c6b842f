"""Large messages that come through a stream: content, late receivers, and ends in the middle."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.point_to_point import streaming
from nbparallel.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    NbParallelError,
    SharedMemoryFullError,
)
from tests.harness import fault_injection
from tests.harness.ranks import Running, context_of

CHUNK = 16 << 10
WINDOW = CHUNK * streaming.CHUNKS
LONG = 20 * WINDOW + 3
"""Bytes: many times the window."""


def small_chunks(monkeypatch: Any) -> None:
    """Make the chunks small, so that short arrays have many; ranks are forked and inherit that."""
    monkeypatch.setattr(streaming, "CHUNK", CHUNK)
    monkeypatch.setattr(streaming, "LEAST_PATIENCE_NS", 2_000_000_000)  # this machine may be busy


def prime(c: Communicator, first: int, second: int) -> None:
    """Let a message be received into a buffer: then the next long one is streamed."""
    if c.rank == first:
        c.send(np.zeros(LONG, "u1"), second)
    else:
        c.recv(np.zeros(LONG, "u1"), src=first)
    c.barrier()


def octets(size: int) -> np.ndarray[Any, Any]:
    """Return bytes of which no two chunks are equal."""
    return (np.arange(size) % 251).astype("u1")


def test_tags_out_of_order(ranks: Any) -> None:
    """A message that is received before an earlier one leaves that one whole, whatever is sent later."""
    size = streaming.LEAST // 8 + 1

    def work(c: Communicator) -> list[tuple[float, float]]:
        found = []
        if c.rank == 0:
            for tag in (1, 2, 3):
                c.send(np.full(size, float(tag)), 1, tag=tag)
            c.recv(src=1)
            for tag in range(4, 12):  # they take the places of chunks that count as taken
                c.send(np.full(size, float(tag)), 1, tag=tag)
            c.send("all sent", 1)
        else:
            buffer = np.empty(size)
            c.recv(buffer, src=0, tag=2)
            c.send("go on", 0)
            c.recv(src=0)
            for tag in (3, 1, *range(11, 3, -1)):
                whole = c.recv(src=0, tag=tag) if tag % 2 else buffer
                if whole is buffer:
                    c.recv(buffer, src=0, tag=tag)
                found.append((float(whole.min()) / tag, float(whole.max()) / tag))
        return found

    assert ranks(2, work)[1] == [(1.0, 1.0)] * 10


def test_sizes(ranks: Any, monkeypatch: Any) -> None:
    """Every size around chunk and window arrives, into a buffer and without one, and nearly all streamed."""
    small_chunks(monkeypatch)
    sizes = [streaming.LEAST + 1, CHUNK * 3 - 1, CHUNK * 3, CHUNK * 3 + 1]
    sizes += [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5, LONG]

    def work(c: Communicator) -> int:
        streamed = []
        write = streaming.StreamOut.write

        def count(self: Any, *arguments: Any) -> Any:
            streamed.append(1)
            return write(self, *arguments)

        monkeypatch.setattr(streaming.StreamOut, "write", count)
        prime(c, 0, 1)
        for size in sizes:
            if c.rank == 0:
                x = octets(size)
                c.send(x, 1)
                c.barrier()
                c.send(x, 1)
                x[...] = 0
            else:
                buffer = np.zeros(size, "u1")
                strided = np.zeros((size, 2), "u1")[:, 0]
                assert c.recv(buffer, src=0) == 0
                assert (buffer == octets(size)).all()
                c.barrier()
                assert c.recv(strided, src=0) == 0
                assert (strided == octets(size)).all()
            c.barrier()
        for size in sizes:
            if c.rank == 0:
                c.send(octets(size), 1)
            else:
                got = c.recv(src=0)
                assert got.flags.writeable
                assert (got == octets(size)).all()
            c.barrier()
        return len(streamed)

    sent = ranks(2, work)[0]
    assert sent >= 2 * len(sizes)


def test_a_send_does_not_depend_on_its_receiver(ranks: Any, monkeypatch: Any) -> None:
    """A receiver who computes gets what was sent, and the sender has gone on and changed its array."""
    small_chunks(monkeypatch)
    monkeypatch.setattr(streaming, "LEAST_PATIENCE_NS", 1_000_000)

    def work(c: Communicator) -> int:
        prime(c, 0, 1)
        late = []
        put_rest = streaming.StreamOut.put_rest

        def count(self: Any, *arguments: Any) -> None:
            late.append(1)
            put_rest(self, *arguments)

        monkeypatch.setattr(streaming.StreamOut, "put_rest", count)
        for tag in range(2 * streaming.SKIPPED):
            if c.rank == 0:
                x = octets(LONG)
                c.send(x, 1, tag=tag)
                x[...] = 0
            c.barrier()
        if c.rank == 1:
            for tag in reversed(range(2 * streaming.SKIPPED)):
                buffer = np.zeros(LONG, "u1")
                c.recv(buffer, src=0, tag=tag)
                assert (buffer == octets(LONG)).all()
        prime(c, 0, 1)
        return len(late)

    assert ranks(2, work)[0] == 1  # the first was begun in vain; then the window is not free


def test_both_send_first(ranks: Any, monkeypatch: Any) -> None:
    """Two ranks that send long arrays to each other first do not wait for each other."""
    small_chunks(monkeypatch)
    monkeypatch.setattr(streaming, "LEAST_PATIENCE_NS", 1_000_000)

    def work(c: Communicator) -> None:
        other = 1 - c.rank
        prime(c, 0, 1)
        prime(c, 1, 0)
        for _ in range(3):
            c.send(octets(LONG) + c.rank, other)
            buffer = np.zeros(LONG, "u1")
            c.recv(buffer, src=other)
            assert (buffer == octets(LONG) + other).all()

    ranks(2, work)


def test_posted_receives(ranks: Any, monkeypatch: Any) -> None:
    """A posted receive takes a stream while its rank waits for something else."""
    small_chunks(monkeypatch)

    def work(c: Communicator) -> None:
        prime(c, 0, 1)
        if c.rank == 0:
            c.isend(octets(LONG), 1, tag=1)
            c.isend(octets(LONG), 1, tag=2)
            c.barrier()
        else:
            first, second = np.zeros(LONG, "u1"), np.zeros(LONG, "u1")
            works = [c.irecv(second, src=0, tag=2), c.irecv(first, src=0, tag=1)]
            c.barrier()
            for posted in works:
                posted.wait()
            assert (first == octets(LONG)).all()
            assert (second == octets(LONG)).all()

    ranks(2, work)


def until_it_fails(c: Communicator) -> Any:
    """Stream from rank 0 to rank 1 again and again; return whom the error blames."""
    prime(c, 0, 1)
    x = np.full(LONG, 7, "u1")
    try:
        while True:
            if c.rank == 0:
                c.send(x, 1)
                assert c.recv(src=1) == "next"
            else:
                c.recv(x, src=0)
                assert (x == 7).all()
                c.send("next", 0)
    except NbParallelError as error:
        x[...] = 1
        time.sleep(0.02)
        assert (x == 1).all(), "a late writer"
        return type(error).__name__, getattr(error, "rank", None)


@pytest.mark.matrix(cover=())
@pytest.mark.fault("F3")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("nth", [22, 23, 95])
def test_killed_in_the_middle(outcomes: Any, monkeypatch: Any, victim: int, nth: int) -> None:
    """Kill -9 of either side between two chunks: the other one is told who died."""
    small_chunks(monkeypatch)
    monkeypatch.setattr(streaming, "LEAST_PATIENCE_NS", 1_000_000)
    found = outcomes(2, until_it_fails, faults=f"half_payload:{victim}:{nth}:kill")
    assert found[victim].signal == signal.SIGKILL
    assert found[1 - victim].value == ("PeerFailedError", victim), found


@pytest.mark.fault("F21")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("action", ["interrupt", "raise"])
def test_interrupted_in_the_middle(outcomes: Any, monkeypatch: Any, victim: int, action: str) -> None:
    """SIGINT or an error between two chunks: that rank raises it, and the other one is told."""
    small_chunks(monkeypatch)
    monkeypatch.setattr(streaming, "LEAST_PATIENCE_NS", 1_000_000)
    found = outcomes(2, until_it_fails, faults=f"half_payload:{victim}:50:{action}")
    expected = KeyboardInterrupt if action == "interrupt" else fault_injection.FaultInjected
    assert isinstance(found[victim].error, expected), found
    assert found[1 - victim].value == ("PeerFailedError", victim), found


@pytest.mark.slow
def test_out_of_time_in_the_middle(outcomes: Any, monkeypatch: Any) -> None:
    """A sender that is stopped between two chunks: recv's time runs out, and the epoch is invalid."""
    small_chunks(monkeypatch)

    def work(c: Communicator) -> Any:
        prime(c, 0, 1)
        x = np.zeros(LONG, "u1")
        try:
            c.send(x, 1) if c.rank == 0 else c.recv(x, src=0, timeout=0.3)
            c.barrier()
        except NbParallelError as error:
            return type(error), c.failed

    def meanwhile(running: Running) -> bool:
        if running.view.read_failure(1) is None:
            return False
        os.kill(running.pids[0], signal.SIGCONT)
        return True

    found = outcomes(2, work, faults="half_payload:0:40:stop", meanwhile=meanwhile)
    assert found[1].value == (CollectiveTimeoutError, True), found
    assert found[0].error is None, found


@pytest.mark.parametrize("comes", [True, False])
def test_no_memory_for_a_late_receiver(outcomes: Any, monkeypatch: Any, comes: bool) -> None:
    """Without memory for the rest the sender waits for its receiver, and is told if he does not come."""
    small_chunks(monkeypatch)
    # A receiver that takes longer over the first two, on a busy machine, would get copies from then on.
    monkeypatch.setattr(streaming, "LEAST_PATIENCE_NS", 10_000_000_000)

    def work(c: Communicator) -> Any:
        prime(c, 0, 1)
        prime(c, 0, 1)  # the window is made then
        monkeypatch.setattr(streaming, "LEAST_PATIENCE_NS", 1_000_000)
        if c.rank == 0:

            def full(*_: Any, **__: Any) -> Any:
                raise SharedMemoryFullError("no memory in this test")

            monkeypatch.setattr(context_of(c).store, "empty", full)
            c.send(octets(LONG), 1)
        else:
            time.sleep(0.3)
            if comes:
                buffer = np.zeros(LONG, "u1")
                c.recv(buffer, src=0)
                assert (buffer == octets(LONG)).all()

    found = outcomes(2, work)
    assert found[1].error is None, found
    if comes:
        assert found[0].error is None, found
    else:
        assert isinstance(found[0].error, DeadlockError), found
        assert "without receiving it" in str(found[0].error)
