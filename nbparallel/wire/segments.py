"""Payloads of the segment protocol, between the supervisor and every process that maps shared memory.

``REGISTER`` (with the descriptor), ``RELEASE``, ``HOLD``, ``ALLOW_WRITE``, ``FORGET``, ``FREED``, ``INTEND``
and ``REMOVED`` go one way, to the supervisor.  ``FETCH`` is answered by ``FETCHED`` (with a descriptor) or by
``LOST``, which carry the question's number.  ``IDLE``, ``DROP``, ``ENDED`` and ``UNMAP`` come unasked, and to
a segment's creator ``LOST``, when its descriptor was not kept and another client asked for it.

What a client holds is a set: fetching a segment twice is one hold, and one ``RELEASE`` ends it.

A *segment* is one use of a block of memory.  The *memory id* names the block over all its uses: a client
that keeps the block mapped after a use (``RELEASE`` says so) may hold a later one by ``HOLD``, without an
answer.

Where there is no room for an array, its maker sends ``FREED`` of no memory (0), and every other client gets
``UNMAP`` of none: it returns what it keeps for reuse.

A segment may have a name in the file system.  ``INTEND`` announces it *before* it exists: whenever its
maker is killed, the supervisor knows what to remove.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Callable
from typing import NamedTuple, Self

from nbparallel.errors import ProtocolError
from nbparallel.wire.frames import Kind

CLIENT_SHIFT = 40
"""A segment's id is its creator's client number << 40 | serial: no process has to be asked for one."""
MAX_CLIENT = 1 << 23
"""Client numbers lie below this, so that an id fits 63 bits."""
NAME_PREFIX = "nbp_"
"""How the file name of every named segment begins."""
MAX_PATH = 4096
"""Longest path of a named segment, in characters."""
MAX_NBYTES = 1 << 62
"""A size at or above this is damage, not data."""

_REGISTER = struct.Struct("<QQQB")
_FETCH = struct.Struct("<QQB")
_FETCHED = struct.Struct("<QQB")
_LOST = struct.Struct("<QB")
_SEGMENT = struct.Struct("<Q")
_USE = struct.Struct("<QQ")
_HOLD = struct.Struct("<QQB")


def segment_id(client: int, serial: int) -> int:
    """Return the id of a client's `serial`-th segment.

    >>> segment_id(2, 7) == 2 << 40 | 7
    True
    """
    if not (0 <= client < MAX_CLIENT and 0 < serial < 1 << CLIENT_SHIFT):
        raise ValueError(f"no segment id for client {client}, serial {serial}")
    return client << CLIENT_SHIFT | serial


def creator_of(segment: int) -> int:
    """Return the number of the client that made a segment."""
    return segment >> CLIENT_SHIFT


def is_segment_id(value: int) -> bool:
    """Return whether some client could have made a segment of this id.

    A client that asks the supervisor for another one breaks the protocol: it is disconnected.
    """
    return 0 < value < MAX_CLIENT << CLIENT_SHIFT and value & ((1 << CLIENT_SHIFT) - 1) != 0


class LostReason(enum.IntEnum):
    """Why a segment was not handed out; the number is part of the protocol."""

    UNKNOWN = 1
    """It is not registered, or its memory has been returned to the system."""
    READ_ONLY = 2
    """Its creator has not allowed others to write."""
    DESCRIPTORS = 3
    """The supervisor has no file descriptor left for it."""
    REMOVED = 4
    """It could only be found by its name, and another process has removed that."""
    NO_PROC = 5
    """Read-only descriptors are made through /proc, which is not there."""


class Register(NamedTuple):
    """``REGISTER``: the sender made this segment and holds it; its descriptor is attached."""

    segment: int
    """Id; its creator part is the sender."""
    nbytes: int
    """Size of the memory behind the descriptor in bytes."""
    writable: bool
    """Whether others may map it for writing."""
    path: str = ""
    """Its name in the file system, to be removed when no process needs it; empty: it has none."""
    memory: int = 0
    """Id of the memory, of the same creator; 0: it is used once."""

    def pack(self) -> bytes:
        """Return the payload."""
        path = pack_path(self.path) if self.path else b""
        return _REGISTER.pack(self.segment, self.nbytes, self.memory, self.writable) + path

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        fixed, rest = payload[: _REGISTER.size], payload[_REGISTER.size :]
        segment, nbytes, memory, writable = _unpack(_REGISTER, fixed, "REGISTER")
        path = unpack_path(rest, Kind.REGISTER) if rest else ""
        if memory:
            _checked_use(segment, memory)
        return cls(_checked(segment), _checked_size(nbytes), _flag(writable), path, memory)


class Fetch(NamedTuple):
    """``FETCH``: the sender wants a descriptor, and holds the segment from the answer on."""

    segment: int
    """Id."""
    writable: bool
    """Whether it wants to write; otherwise the descriptor that comes is open for reading only."""
    memory: int = 0
    """Which memory it takes the segment for a use of; 0: it does not matter."""

    def pack(self) -> bytes:
        """Return the payload."""
        return _FETCH.pack(self.segment, self.memory, self.writable)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        segment, memory, writable = _unpack(_FETCH, payload, "FETCH")
        if memory:
            _checked_use(segment, memory)
        return cls(_checked(segment), _flag(writable), memory)


class Hold(NamedTuple):
    """``HOLD``: the sender still maps the memory, and holds this use of it from now on."""

    segment: int
    """Id."""
    memory: int
    """Id of the memory."""
    writable: bool
    """Whether it maps it for writing."""

    def pack(self) -> bytes:
        """Return the payload."""
        return _HOLD.pack(self.segment, self.memory, self.writable)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        segment, memory, writable = _unpack(_HOLD, payload, "HOLD")
        return cls(*_checked_use(segment, memory), _flag(writable))


class Release(NamedTuple):
    """``RELEASE``: the sender ends its hold."""

    segment: int
    """Id."""
    memory: int = 0
    """Id of the memory, if the sender keeps it mapped; else 0."""


class AllowWrite(NamedTuple):
    """``ALLOW_WRITE``: the segment's creator lets others write."""

    segment: int
    """Id."""


class Forget(NamedTuple):
    """``FORGET``: the segment's creator ends its hold and does not want the memory back."""

    segment: int
    """Id."""


class Freed(NamedTuple):
    """``FREED``: a memory's creator has returned it to the system."""

    memory: int
    """Id of the memory; 0: the sender has no room for an array."""


class Intend(NamedTuple):
    """``INTEND``: the sender is about to make a name."""

    path: str
    """The name."""


class Removed(NamedTuple):
    """``REMOVED``: the sender has removed a name of its own, or did not make it after all."""

    path: str
    """The name."""


SegmentMessage = Register | Fetch | Hold | Release | AllowWrite | Forget | Freed | Intend | Removed
"""What a client sends to the supervisor about segments."""
MESSAGES: dict[Kind, Callable[[bytes], SegmentMessage]] = {
    Kind.REGISTER: Register.unpack,
    Kind.FETCH: Fetch.unpack,
    Kind.HOLD: Hold.unpack,
    Kind.RELEASE: lambda payload: Release(*unpack_use(payload, Kind.RELEASE)),
    Kind.ALLOW_WRITE: lambda payload: AllowWrite(unpack_segment(payload, Kind.ALLOW_WRITE)),
    Kind.FORGET: lambda payload: Forget(unpack_segment(payload, Kind.FORGET)),
    Kind.FREED: lambda payload: Freed(unpack_memory(payload, Kind.FREED)),
    Kind.INTEND: lambda payload: Intend(unpack_path(payload, Kind.INTEND)),
    Kind.REMOVED: lambda payload: Removed(unpack_path(payload, Kind.REMOVED)),
}
"""How each of them is read; `ProtocolError` if a payload is damaged."""


class Fetched(NamedTuple):
    """``FETCHED``: the answer with the descriptor."""

    segment: int
    """Id."""
    nbytes: int
    """Size of the memory behind the descriptor in bytes."""
    writable: bool
    """Whether the descriptor is open for writing."""

    def pack(self) -> bytes:
        """Return the payload."""
        return _FETCHED.pack(self.segment, self.nbytes, self.writable)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        segment, nbytes, writable = _unpack(_FETCHED, payload, "FETCHED")
        return cls(_checked(segment), _checked_size(nbytes), _flag(writable))


class Lost(NamedTuple):
    """``LOST``: the answer without one."""

    segment: int
    """Id."""
    reason: LostReason
    """Why not."""

    def pack(self) -> bytes:
        """Return the payload."""
        return _LOST.pack(self.segment, self.reason)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        segment, reason = _unpack(_LOST, payload, "LOST")
        try:
            return cls(_checked(segment), LostReason(reason))
        except ValueError:
            raise ProtocolError(f"LOST frame with unknown reason {reason}") from None


def pack_segment(segment: int) -> bytes:
    """Return the payload of ``ALLOW_WRITE``, ``FORGET``, ``IDLE``, ``DROP``; of ``FREED``, ``UNMAP``.

    So are those with the id of a parcel or a mailbox: `wire.parcels`.
    """
    return _SEGMENT.pack(segment)


def unpack_segment(payload: bytes, kind: Kind) -> int:
    """Read the payload of one of these; `ProtocolError` if it is damaged."""
    return _checked(_unpack(_SEGMENT, payload, kind.name)[0])


def unpack_memory(payload: bytes, kind: Kind) -> int:
    """Read the payload of ``FREED`` or ``UNMAP``: a memory's id or 0; `ProtocolError` if it is damaged."""
    memory = _unpack(_SEGMENT, payload, kind.name)[0]
    return memory and _checked(memory)


def pack_use(segment: int, memory: int) -> bytes:
    """Return the payload of ``RELEASE`` and ``ENDED``; without a memory the sender keeps nothing mapped."""
    return _USE.pack(segment, memory) if memory else _SEGMENT.pack(segment)


def unpack_use(payload: bytes, kind: Kind) -> tuple[int, int]:
    """Read the payload of one of these, (segment, memory or 0); `ProtocolError` if it is damaged."""
    if len(payload) == _SEGMENT.size:
        return unpack_segment(payload, kind), 0
    segment, memory = _unpack(_USE, payload, kind.name)
    return _checked_use(segment, memory)


def is_use(segment: int, memory: int) -> bool:
    """Return whether a segment of this id could be a use of a memory: the same creator made both, in order.

    >>> is_use(segment_id(2, 7), segment_id(2, 5)), is_use(segment_id(2, 7), segment_id(1, 5))
    (True, False)
    """
    same = creator_of(segment) == creator_of(memory)
    return is_segment_id(segment) and is_segment_id(memory) and same and memory <= segment


def is_name(path: str) -> bool:
    """Return whether a path could be a segment's name: nothing else is ever removed.

    >>> is_name("/dev/shm/nbp_abc_1"), is_name("/home/me/thesis.tex"), is_name("nbp_abc_1")
    (True, False, False)
    """
    return (
        len(path) <= MAX_PATH
        and os.path.isabs(path)
        and "\0" not in path
        and os.path.basename(path).startswith(NAME_PREFIX)
    )


def pack_path(path: str) -> bytes:
    """Return the payload of ``INTEND`` and ``REMOVED``."""
    return os.fsencode(path)


def unpack_path(payload: bytes, kind: Kind) -> str:
    """Read the payload of one of these; `ProtocolError` if it names no segment."""
    path = os.fsdecode(payload)
    if not is_name(path):
        raise ProtocolError(f"{kind.name} frame with {path[:80]!r}, which is no segment's name")
    return path


class NoticeKind(enum.Enum):
    """What a client learns about a segment without having asked."""

    IDLE = "idle"
    """To its creator: no client holds it, the memory may be used again under a new id."""
    DROP = "drop"
    """To its creator: no client holds it any more, and its memory must be returned to the system."""
    UNCLAIMED_HOLD = "unclaimed hold"
    """A hold was granted after the client had stopped waiting (an interrupt); release it if unwanted."""
    ENDED = "ended"
    """To a client that keeps its memory mapped: no client holds it, it may be used again under a later id."""
    UNMAP = "unmap"
    """To a client that keeps a memory mapped: its owner has returned it to the system.  To any, of memory 0:
    another one has no room, so that what is kept for reuse is to be returned."""
    NOT_KEPT = "not kept"
    """To its creator: the supervisor had no room for the descriptor; send it with the next handle again."""


class Notice(NamedTuple):
    """A notice to a client, to be handled between two requests."""

    kind: NoticeKind
    """What happened."""
    segment: int
    """To which segment; 0 for ``UNMAP``."""
    memory: int = 0
    """To which memory, for ``ENDED`` and ``UNMAP``."""


def _unpack(layout: struct.Struct, payload: bytes, name: str) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise ProtocolError(f"{name} frame with {len(payload)} bytes of payload instead of {layout.size}")
    return layout.unpack(payload)


def _checked(segment: int) -> int:
    if not is_segment_id(segment):
        raise ProtocolError(f"no segment has the id {segment:#x}")
    return segment


def _checked_use(segment: int, memory: int) -> tuple[int, int]:
    if not is_use(segment, memory):
        raise ProtocolError(f"segment {segment:#x} is no use of memory {memory:#x}")
    return segment, memory


def _checked_size(nbytes: int) -> int:
    if not 0 < nbytes < MAX_NBYTES:
        raise ProtocolError(f"no segment has {nbytes} bytes")
    return nbytes


def _flag(value: int) -> bool:
    if value not in (0, 1):
        raise ProtocolError(f"a yes-or-no field holds {value}")
    return value == 1
