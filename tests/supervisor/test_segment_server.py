"""The desk: frames in, frames and descriptors out; damage never hurts more than its sender."""

import fcntl
import mmap
import os

import pytest

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.ledger.segment_server import SegmentServer
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.segments import (
    AllowWrite,
    Fetch,
    Fetched,
    Forget,
    Lost,
    LostReason,
    Register,
    segment_id,
)

SEGMENT = segment_id(0, 1)


def memory(nbytes=4096):
    """Return a descriptor of sealed memory."""
    fd = os.memfd_create("nbp-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.fixture
def server():
    """Make a desk with clients 0 and 1."""
    server = SegmentServer()
    server.ledger.clients.add(0)
    server.ledger.clients.add(1)
    yield server
    server.close()
    server.close()


def register(server, segment=SEGMENT, *, writable=False, nbytes=4096):
    """Register a segment for its creator."""
    payload = Register(segment, nbytes, writable).pack()
    return server.receive(segment >> 40, Frame(Kind.REGISTER, 0, 0, payload, [memory(nbytes)]))


def fetch(server, client, segment=SEGMENT, *, writable=False):
    """Ask for a segment."""
    return server.receive(client, Frame(Kind.FETCH, 0, 5, Fetch(segment, writable).pack(), []))


def test_a_reader_gets_a_descriptor_for_reading(server):
    """What is granted for reading cannot be mapped for writing; what is granted for writing can."""
    assert register(server) == []
    (answer,) = fetch(server, 1)
    assert (answer.client, answer.message, answer.sequence) == (1, Fetched(SEGMENT, 4096, False), 5)
    mmap.mmap(answer.fds[0], 4096, prot=mmap.PROT_READ).close()
    with pytest.raises(PermissionError):
        mmap.mmap(answer.fds[0], 4096)
    answer.close()
    (refusal,) = fetch(server, 1, writable=True)
    assert refusal.message == Lost(SEGMENT, LostReason.READ_ONLY)
    server.receive(0, Frame(Kind.ALLOW_WRITE, 0, 0, AllowWrite(SEGMENT).pack(), []))
    (answer,) = fetch(server, 1, writable=True)
    mmap.mmap(answer.fds[0], 4096).close()
    answer.close()
    answer.close()


def test_a_descriptor_that_was_not_kept_may_come_again():
    """Its creator learns that it was asked for; what comes when one is kept changes nothing."""
    server = SegmentServer(max_descriptors=0)
    server.ledger.clients.add(0)
    server.ledger.clients.add(1)
    assert register(server) == []
    refusal, notice = fetch(server, 1)
    assert (refusal.client, refusal.sequence) == (1, 5)
    assert (notice.client, notice.sequence) == (0, 0)
    for reply in (refusal, notice):
        assert reply.message == Lost(SEGMENT, LostReason.DESCRIPTORS)
    server.max_descriptors = 1
    for _ in range(2):
        assert register(server) == []
    (answer,) = fetch(server, 1)
    assert isinstance(answer.message, Fetched)
    answer.close()
    server.close()


@pytest.mark.parametrize(
    ("kind", "payload", "nfds"),
    [
        (Kind.REGISTER, Register(SEGMENT, 4096, True).pack(), 0),
        (Kind.REGISTER, Register(SEGMENT, 4096, True).pack(), 2),
        (Kind.REGISTER, Register(SEGMENT, 8192, True).pack(), 1),
        (Kind.REGISTER, Register(segment_id(1, 1), 4096, True).pack(), 1),
        (Kind.REGISTER, b"", 1),
        (Kind.REGISTER, Register(SEGMENT, 4096, True).pack()[:16] + b"\2" + bytes(8), 1),
        (Kind.FETCH, b"x" * 9, 0),
        (Kind.FETCH, Fetch(SEGMENT, False).pack(), 1),
        (Kind.RELEASE, b"\0" * 8, 0),
        (Kind.FORGET, Forget(segment_id(1, 1)).pack(), 0),
        (Kind.TASK, b"", 0),
    ],
)
def test_damage_is_the_senders_problem(server, kind, payload, nfds):
    """A damaged frame raises `ProtocolError`, leaves no descriptor open, and the desk goes on."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError):
        server.receive(0, Frame(kind, 0, 0, payload, [memory() for _ in range(nfds)]))
    assert len(os.listdir("/proc/self/fd")) == before
    register(server)
    assert tuple(server.ledger.entries) == (SEGMENT,)


def test_a_descriptor_that_is_no_memory(server):
    """A pipe in place of a segment is refused."""
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(ProtocolError):
        server.receive(0, Frame(Kind.REGISTER, 0, 0, Register(SEGMENT, 4096, True).pack(), [read]))
