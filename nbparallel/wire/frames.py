"""Frames: what travels over an inherited ``SOCK_SEQPACKET`` socketpair.

A frame is one datagram: a fixed header and at most `MAX_INLINE` bytes of payload, with up to `MAX_FDS`
file descriptors attached.  A larger payload travels in a sealed memfd that is the frame's *first*
descriptor (flag `SPILLED`).

Some facts about SEQPACKET socketpairs and descriptors (unix(7), cmsg(3)):

* they keep record boundaries and deliver the descriptors with the record that carried them;
* a record must fit the socket's send buffer (212,992 bytes by default), hence the spill;
* at most 253 descriptors travel in one message (``SCM_MAX_FD``), more is ``EINVAL``;
* `socket.recv_fds` ignores its flags in Python 3.11, so that received descriptors would lose
  close-on-exec: `recvmsg` with ``MSG_CMSG_CLOEXEC`` is used instead;
* ``MSG_CTRUNC`` means that descriptors were lost: the frame is refused and what did arrive is closed;
* when the system is short of memory, sending and receiving fail with ENOMEM or ENOBUFS, and with ETOOMANYREFS
  when too many descriptors of a user other than root are under way (RLIMIT_NOFILE); nothing is lost then,
  and the other end is alive: it has to be tried again.
"""

from __future__ import annotations

import array
import enum
import errno
import io
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbparallel.errors import FileDescriptorLimitError, ProtocolError, SharedMemoryFullError
from nbparallel.wire.units import size_text

MAGIC = b"NBP1"
VERSION = 1
HEADER = struct.Struct("<4sBBHIIQQ")
"""magic, version, flags, kind, epoch, payload length, sequence, spilled length."""
MAX_INLINE = 60 * 1024
"""Bytes of payload in one datagram; with the header it stays under 64 KiB."""
MAX_SPILLED = 1 << 40
"""A length above this is damage, not data."""
MAX_FDS = 64
PASSING = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})
"""Errors of a socket that say nothing about the other end."""
SPILLED = 1
"""Flag: the payload lies in the memfd that is the frame's first descriptor."""

DOOR_HEAD = struct.Struct("<HHI")
"""Begins a frame between the nodes of two hosts: the other host's index, a `MailKind`, bytes that follow."""
Octets = bytes | memoryview


class MailKind(enum.IntEnum):
    """What a frame at a door brings."""

    CLOSED = 0
    """Nothing: the link with that host is closed."""
    RING = 1
    WORDS = 2
    FETCH = 3
    PIECE = 4
    ENDED = 5
    """All ranks of that host have ended the cell: nothing follows but pieces."""
    FAILED = 6
    CLOCK = 7
    """What time it is there, or the answer."""


class Kind(enum.IntEnum):
    """What a frame says; the number is part of the protocol."""

    # kernel <-> supervisor
    HELLO = 1
    SPAWN = 2
    READY = 3
    DIED = 4
    STOP = 5
    EPOCH = 6
    KILL = 7
    START_FAILED = 8
    LEDGER = 10
    SWEPT = 11
    # supervisor <-> template
    FORK = 20
    FORKED = 21
    TEMPLATE_READY = 22
    # rank, or process that another client started -> supervisor
    ANNOUNCE = 30
    # any client <-> supervisor: segments
    REGISTER = 40
    FETCH = 41
    FETCHED = 42
    LOST = 43
    RELEASE = 44
    ALLOW_WRITE = 45
    FORGET = 46
    IDLE = 47
    DROP = 48
    INTEND = 49
    REMOVED = 50
    HOLD = 51
    FREED = 52
    ENDED = 53
    UNMAP = 54
    POST = 55
    TAKE = 56
    OPEN = 57
    CLOSE = 58
    # kernel -> rank
    CONFIGURE = 60
    TASK = 61
    JOIN_EPOCH = 65
    EXIT = 66
    STRATEGY = 67
    INSPECT = 68
    INPUT = 69
    COMPLETE = 70
    WORKING_CONTEXT = 71
    SETTLE_MESSAGES = 72
    # rank -> kernel
    RANK_READY = 80
    DISPLAY = 81
    STREAM = 82
    OUTCOME = 83
    OBSERVED = 84
    REPORT = 87
    # a process of a script <-> the supervisor of its world
    JOIN = 90
    JOINED = 91
    REFUSED = 92
    ABORT_JOIN = 93
    LEAVE_WORLD = 94
    # about a process that a client starts, and between that and the supervisor
    INTRODUCE = 100
    WELCOME = 101
    MEET = 103


_KINDS = {int(kind): kind for kind in Kind}
# As plain numbers: arithmetic with enumerations takes as long as the system call.
_CLOEXEC, _CUT_OFF = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC | socket.MSG_TRUNC)
_ANCILLARY_SIZE = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


@dataclass(slots=True)
class Frame:
    """One received frame; its receiver owns the descriptors."""

    kind: Kind
    epoch: int
    sequence: int
    payload: bytes
    fds: list[int]

    def close(self) -> None:
        """Close every descriptor that was not taken."""
        while self.fds:
            os.close(self.fds.pop())


def encode(kind: int, payload: bytes = b"", *, epoch: int = 0, sequence: int = 0, spilled: int = 0) -> bytes:
    """Return the datagram of a frame; `payload` must be inline-sized."""
    flags = SPILLED if spilled else 0
    return HEADER.pack(MAGIC, VERSION, flags, kind, epoch, len(payload), sequence, spilled) + payload


def spill(payload: bytes) -> int:
    """Return a sealed memfd that holds `payload`; the caller closes it.

    Raises
    ------
    SharedMemoryFullError, FileDescriptorLimitError
        The system refuses it.
    """
    try:
        return _spilled(payload)
    except OSError as error:
        text = f"a message of {size_text(len(payload))} needs a file in memory: {error.strerror}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise FileDescriptorLimitError(error.errno, f"{text} (ulimit -n)") from error
        raise SharedMemoryFullError(f"{text}; %parallel_doctor shows the limits") from error


def _spilled(payload: bytes) -> int:
    fd = os.memfd_create("nbp-frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(payload)
        while view:
            view = view[os.write(fd, view) :]
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def send(
    through: Callable[[bytes, Sequence[int]], object],
    kind: int,
    payload: bytes,
    fds: Sequence[int],
    *,
    epoch: int = 0,
    sequence: int = 0,
) -> None:
    """Pass a frame's datagram and descriptors to `through`; a payload that is too large goes in a file."""
    if len(payload) <= MAX_INLINE:
        through(encode(kind, payload, epoch=epoch, sequence=sequence), fds)
        return
    fd = spill(payload)
    try:
        through(encode(kind, epoch=epoch, sequence=sequence, spilled=len(payload)), [fd, *fds])
    finally:
        os.close(fd)


def receive(sock: socket.SocketType, flags: int = 0, *, largest: int = MAX_SPILLED) -> Frame | None:
    """Take one frame from `sock`, with a payload of `largest` bytes at most; None at the end of the stream.

    Raises
    ------
    BlockingIOError
        The socket does not block and nothing is there.
    ProtocolError
        The datagram is no frame; its descriptors are closed.
    """
    data, ancillary, message_flags, _ = sock.recvmsg(
        HEADER.size + MAX_INLINE, _ANCILLARY_SIZE, flags | _CLOEXEC
    )
    fds = array.array("i")
    for level, kind, chunk in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(chunk[: len(chunk) - len(chunk) % fds.itemsize])
    if not data and not fds:
        return None
    frame = Frame(Kind.HELLO, 0, 0, b"", list(fds))
    try:
        _decode(data, message_flags, frame, largest)
    except BaseException:
        frame.close()
        raise
    return frame


def _decode(data: bytes, message_flags: int, frame: Frame, largest: int) -> None:
    if message_flags & _CUT_OFF:
        raise ProtocolError("a frame was truncated: descriptors or bytes were lost on the way")
    if len(data) < HEADER.size:
        raise ProtocolError(f"a frame of {len(data)} bytes is shorter than its header")
    magic, version, flags, kind, epoch, length, sequence, spilled = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"not a frame of protocol {VERSION}: {data[:5]!r}")
    if length != len(data) - HEADER.size:
        raise ProtocolError(f"a frame announces {length} bytes and carries {len(data) - HEADER.size}")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"unknown kind of frame: {kind}")
    frame.kind = known
    frame.epoch, frame.sequence = epoch, sequence
    if flags & SPILLED:
        if not frame.fds or spilled > largest:
            raise ProtocolError("a spilled frame lacks its descriptor, or its length is damaged")
        frame.payload = _read_spilled(frame.fds[0], spilled)
        os.close(frame.fds.pop(0))
    else:
        frame.payload = data[HEADER.size :]


def _read_spilled(fd: int, length: int) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or not status.st_size == length <= 512 * status.st_blocks:
        # a file with holes would cost its sender nothing and the receiver all its memory
        raise ProtocolError(f"a spilled frame of {length} bytes is no memory that its sender has written")
    with io.open(fd, "rb", closefd=False) as file:  # noqa: UP020  user code may replace the builtin
        file.seek(0)
        return file.read(length)
