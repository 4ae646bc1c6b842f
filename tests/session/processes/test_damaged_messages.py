"""F83: what a rank sends that is no message costs it its life, and neither the notebook nor the others."""

from __future__ import annotations

import os
import pickle
import socket
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from nbparallel.errors import ParallelError, ProtocolError
from nbparallel.session import Session
from nbparallel.session.processes.rank_handle import EventLoop, RankHandle
from nbparallel.wire import frames
from nbparallel.wire.frames import HEADER, MAGIC, Kind
from nbparallel.wire.messages import Outcome, Stream

MIB = 1 << 20


class Still(EventLoop):
    """An event loop without a thread: the test reads."""

    def __init__(self) -> None:
        self.callbacks: dict[int, Any] = {}

    def watch(self, fd: int, callback: Any) -> None:
        """For the test, which calls it."""
        self.callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Nothing was."""

    def call_at(self, due: float, function: Any) -> None:
        """Nothing is due."""


class Wire:
    """A rank's handle, and the rank's end of its socket in the hands of a test."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.ended: list[RankHandle] = []
        loop = Still()
        self.handle = RankHandle(
            0,
            1,
            loop,
            post=lambda _, message: self.posted.append(message),
            output_of=lambda number: None,
            on_report=lambda rank, seen: None,
            end=self.ended.append,
        )
        self._read = loop.callbacks[self.handle.channel.fileno()]
        mine, *pipes = self.handle.rank_ends
        self.socket = socket.socket(fileno=os.dup(mine))
        self._pipes = [os.dup(pipe) for pipe in pipes]
        self.handle.close_theirs()

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send one datagram and have it read."""
        socket.send_fds(self.socket, [data], fds)
        self._read()

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        for pipe in self._pipes:
            os.close(pipe)
        self.handle.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Return a fresh handle."""
    wires = Wire()
    yield wires
    wires.close()


OUTCOME = Outcome(1, 0, True, False, None, "", "", None, False, 1, 1, ())


def sparse(nbytes: int) -> int:
    """Return memory of which no page was ever written."""
    fd = os.memfd_create("nbp-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def spilled(length: int) -> bytes:
    """Return the head of a frame whose payload lies in its first descriptor."""
    return HEADER.pack(MAGIC, frames.VERSION, frames.SPILLED, Kind.OUTCOME, 0, 0, 0, length)


NONSENSE = {
    "no frame": b"hello",
    "no pickle": frames.encode(Kind.OUTCOME, b"hello"),
    "a cut pickle": frames.encode(Kind.OUTCOME, pickle.dumps(OUTCOME, 5)[:-9]),
    "another object": frames.encode(Kind.DISPLAY, pickle.dumps({"a": 1})),
    "a kind that ranks do not send": frames.encode(Kind.SPAWN, pickle.dumps(None)),
    "a kind that there is not": HEADER.pack(MAGIC, frames.VERSION, 0, 999, 0, 0, 0, 0),
    "a length that is not so": HEADER.pack(MAGIC, frames.VERSION, 0, Kind.OUTCOME, 0, 5, 0, 0),
    "a payload that is nowhere": spilled(100),
    "a length of 2**64 - 1": spilled((1 << 64) - 1),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_f83_nonsense_ends_its_sender(wire: Wire, what: str) -> None:
    """The rank is given up at the first frame that is none; what it says after that is not heard."""
    wire.send(frames.encode(Kind.OUTCOME, pickle.dumps(OUTCOME, 5)))
    assert wire.posted == [OUTCOME]
    wire.send(NONSENSE[what])
    assert wire.ended == [wire.handle]
    assert wire.handle.protocol_error
    with pytest.raises(OSError, match="Broken pipe"):
        wire.send(frames.encode(Kind.OUTCOME, pickle.dumps(OUTCOME, 5)))
    assert wire.posted == [OUTCOME]


@pytest.mark.parametrize("nbytes", [MIB, 1 << 39])
def test_f83_memory_that_was_never_written_is_not_read(wire: Wire, nbytes: int) -> None:
    """A payload said to lie in a file that is all hole is refused: its sender pays nothing, we would."""
    fd = sparse(nbytes)
    tracemalloc.start()
    try:
        wire.send(spilled(nbytes), (fd,))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
        os.close(fd)
    assert "no memory that its sender has written" in wire.handle.protocol_error


def test_f83_a_pipe_is_no_payload(wire: Wire) -> None:
    """A descriptor that would make the reader wait is not read."""
    read, write = os.pipe()
    wire.send(spilled(0), (read,))
    os.close(read)
    os.close(write)
    assert wire.handle.protocol_error


def test_f83_descriptors_that_nobody_expects_are_closed(wire: Wire) -> None:
    """A good frame with sixty files on it is a good frame; none of them stays open."""
    before = len(os.listdir("/proc/self/fd"))
    data = frames.encode(Kind.STREAM, pickle.dumps(Stream(1, "stdout", "x"), 5))
    wire.send(data, (0,) * 60)
    assert not wire.handle.protocol_error
    assert len(os.listdir("/proc/self/fd")) == before
    wire.send(data, (0,) * 100)
    assert "truncated" in wire.handle.protocol_error
    assert len(os.listdir("/proc/self/fd")) == before


TO_THE_NOTEBOOK = """
import gc, socket, os
from nbparallel.channel import Channel
from nbparallel.channel.channel import SegmentClient
from nbparallel.wire import frames
channels = {c.fileno() for c in gc.get_objects() if isinstance(c, Channel)}
brokers = {c.fileno() for c in gc.get_objects() if isinstance(c, SegmentClient)}
kernel, segments = (
    socket.socket(fileno=os.dup(fd)) for found in (channels - brokers, brokers) for fd in found
)
"""
ATTACKS = {
    "the notebook": "kernel.send(b'hello')",
    "the notebook, idle": (
        "import threading, time\nthreading.Timer(0.2, lambda: kernel.send(b'hello')).start()"
    ),
    "the supervisor, a list": "segments.send(frames.encode(30, b'[]'))",
    "the supervisor, nested": "segments.send(frames.encode(30, b'[' * 50_000))",
    "the supervisor, no process": "segments.send(frames.encode(30, (0).to_bytes(8, 'little')))",
    "the supervisor, another process": "segments.send(frames.encode(30, (1).to_bytes(8, 'little')))",
}


@pytest.mark.slow
def test_f83_a_rank_that_talks_nonsense_is_named_and_comes_back() -> None:
    """To the notebook or to the supervisor, in a cell or after it: it is ended, the others keep all."""
    with Session(2) as session:
        session.run("x = rank")
        pids = [rank.pid for rank in session.statistics().ranks]
        for where, attack in ATTACKS.items():
            session.run(f"if rank == 1:\n{TO_THE_NOTEBOOK}".replace("\n", "\n    "))
            if "idle" in where:
                session.run(attack, ranks=[1])
                pid = session.statistics().ranks[1].pid
                while os.path.exists(f"/proc/{pid}"):
                    pass
                notes = session.run("x", ranks=[0]).notes
                assert any("it sent malformed data" in note for note in notes), notes
            else:
                with pytest.raises(ParallelError) as caught:
                    session.run(f"if rank == 1:\n    {attack}\nrecv(src=0) if rank else recv(src=1)")
                error = caught.value.errors[1]
                assert isinstance(error, ProtocolError), (where, error)
                assert "rank 1 (process" in str(error)
                assert next(iter(caught.value.errors)) == 1
            assert session.run("x", ranks=[0]).values[0] == 0
            assert session.run("all_reduce(1)").values == [2, 2]
        after = [rank.pid for rank in session.statistics().ranks]
        assert after[0] == pids[0]
        assert after[1] != pids[1]
