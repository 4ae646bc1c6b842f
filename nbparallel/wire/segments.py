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
from operator import itemgetter
from typing import Any, ClassVar, Self, TypeAlias, TypeVar, dataclass_transform, get_args

from nbparallel.errors import ProtocolError
from nbparallel.wire.frames import Kind

CLIENT_SHIFT = 40
"""A segment's id is its creator's client number << 40 | serial: no process has to be asked for one."""
MAX_CLIENT = 1 << 23
"""Client numbers lie below this, so that an id fits 63 bits."""
FIRST_INTRODUCED = 1 << 22
"""Those of processes that other clients started lie from here on."""
NAME_PREFIX = "nbp_"
"""How the file name of every named segment begins."""
MAX_PATH = 4096
"""Longest path of a named segment, in characters."""
MAX_NBYTES = 1 << 62
"""A size at or above this is damage, not data."""


def segment_id(client: int, serial: int) -> int:
    """Return the id of a client's `serial`-th segment.

    >>> segment_id(2, 7) == 2 << 40 | 7
    True
    """
    return client << CLIENT_SHIFT | serial


def creator_of(segment: int) -> int:
    """Return the number of the client that made a segment."""
    return segment >> CLIENT_SHIFT


_END, _SERIAL = MAX_CLIENT << CLIENT_SHIFT, (1 << CLIENT_SHIFT) - 1


def is_segment_id(value: int) -> bool:
    """Return whether some client could have made a segment of this id.

    A client that asks the supervisor for another one breaks the protocol: it is disconnected.
    """
    return 0 < value < _END and value & _SERIAL != 0


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


def is_use(segment: int, memory: int) -> bool:
    """Return whether a segment of this id could be a use of a memory: the same creator made both, in order.

    >>> is_use(segment_id(2, 7), segment_id(2, 5)), is_use(segment_id(2, 7), segment_id(1, 5))
    (True, False)
    """
    same = segment >> CLIENT_SHIFT == memory >> CLIENT_SHIFT
    return same and memory <= segment and is_segment_id(segment) and is_segment_id(memory)


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


def _name(rest: bytes) -> str:
    path = os.fsdecode(rest)
    if not is_name(path):
        raise ProtocolError(f"a frame with {path[:80]!r}, which is no segment's name")
    return path


_FIELDS: dict[str, tuple[str, Callable[[tuple[int, ...], int], bool] | None]] = {
    "SegmentId": ("Q", lambda values, index: is_segment_id(values[index])),
    "MemoryId": ("Q", lambda values, index: is_use(values[0], values[index])),
    "MaybeMemory": ("Q", lambda values, index: values[index] == 0 or is_use(values[0], values[index])),
    "AnyMemory": ("Q", lambda values, index: values[index] == 0 or is_segment_id(values[index])),
    "Nbytes": ("Q", lambda values, index: 0 < values[index] < MAX_NBYTES),
    "IntroducedNumber": ("Q", lambda values, index: FIRST_INTRODUCED <= values[index] < MAX_CLIENT),
    "Pid": ("q", lambda values, index: 0 < values[index] < 1 << 31),
    "Seconds": ("d", None),
    "bool": ("?", None),
    "LostReason": ("B", lambda values, index: values[index] in frozenset(LostReason)),
}
"""Word of an annotation -> its letter (struct(3)), and what a value must be."""
_RESTS: dict[str, Callable[[bytes], str]] = {
    "Name": _name,
    "MaybeName": lambda rest: _name(rest) if rest else "",
    "Place": os.fsdecode,
}
_P = TypeVar("_P", bound="FramePayload")


SegmentId: TypeAlias = int
"""Of a segment, or made as one is: of a memory, a parcel, a mailbox, a process that is introduced."""
MemoryId: TypeAlias = int
"""Of the memory of which the frame's segment is a use."""
MaybeMemory: TypeAlias = int
"""The same, or 0."""
AnyMemory: TypeAlias = int
"""Of a memory, or 0."""
Nbytes: TypeAlias = int
"""Of memory, in bytes."""
IntroducedNumber: TypeAlias = int
"""Client number of a process that another client started."""
Pid: TypeAlias = int
"""Of a process."""
Seconds: TypeAlias = float
"""A time."""
Name: TypeAlias = str
"""Path of a segment's name: the rest of the payload."""
MaybeName: TypeAlias = str
"""The same, or empty."""
Place: TypeAlias = str
"""Any text: the rest of the payload."""


class FramePayload(tuple[Any, ...]):
    """What a frame holds: `frame` reads the layout, and what is damage, from a class's annotations.

    A tuple, because it is made and taken apart with every frame; and no dataclass or `NamedTuple`: making one
    takes 0.2 to 0.4 ms, and every process makes two dozen of these when it starts.

    >>> Fetch.unpack(Fetch(segment_id(1, 2), True).pack())
    Fetch(1099511627778, True, 0)
    """

    kind: ClassVar[Kind]
    __match_args__: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[dict[str, Any]]
    _layout: ClassVar[struct.Struct]
    _checks: ClassVar[tuple[tuple[int, Callable[[tuple[int, ...], int], bool]], ...]]
    _flags: ClassVar[tuple[int, ...]]
    """Where in the payload a byte says yes or no."""
    _rest: ClassVar[str]
    """Word of the last field, if that takes the rest."""

    def __new__(cls, *values: Any, **more: Any) -> Self:
        """Make one of its fields in order, or by name."""
        for name in cls.__match_args__[len(values) :]:
            values += (more[name] if name in more else cls._defaults[name],)
        return tuple.__new__(cls, values)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and tuple.__eq__(self, other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}{tuple.__repr__(self)}"

    def pack(self) -> bytes:
        """Return the payload."""
        if not self._rest:
            return self._layout.pack(*self)
        *fixed, rest = self
        return self._layout.pack(*fixed) + os.fsencode(rest)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        size, rest = cls._layout.size, cls._rest
        if len(payload) != size and not (rest and len(payload) > size):
            text = f"{cls.kind.name} frame with {len(payload)} bytes of payload instead of {size}"
            raise ProtocolError(text)
        values = cls._layout.unpack_from(payload)
        for index, check in cls._checks:
            if not check(values, index):
                field = cls.__match_args__[index]
                raise ProtocolError(f"{cls.kind.name} frame with {field} {values[index]:#x}, which none has")
        for place in cls._flags:
            if payload[place] > 1:
                raise ProtocolError(f"a yes-or-no field of a {cls.kind.name} frame holds {payload[place]}")
        return tuple.__new__(cls, (*values, _RESTS[rest](payload[size:])) if rest else values)


@dataclass_transform(eq_default=False, frozen_default=True)
def frame(kind: Kind) -> Callable[[type[_P]], type[_P]]:
    """Make the payload of a kind of frames of a class whose annotations are words of `_FIELDS`, `_RESTS`."""

    def declare(made: type[_P]) -> type[_P]:
        words: dict[str, str] = made.__annotations__
        letters, checks, flags, last = "<", [], [], ""
        for index, word in enumerate(words.values()):
            last = word
            letter, check = _FIELDS.get(word, ("", None))
            if letter == "?":
                flags.append(struct.calcsize(letters))
            if check is not None:
                checks.append((index, check))
            letters += letter
        made._defaults = {name: vars(made)[name] for name in words if name in vars(made)}
        for index, name in enumerate(words):
            setattr(made, name, property(itemgetter(index)))
        type.__setattr__(made, "__match_args__", tuple(words))  # mypy takes it for read-only
        made.kind, made._layout = kind, struct.Struct(letters)
        made._checks, made._flags = tuple(checks), tuple(flags)
        made._rest = last if last in _RESTS else ""
        return made

    return declare


@frame(Kind.REGISTER)
class Register(FramePayload):
    """The sender made this segment and holds it; its descriptor is attached.

    It is sent again for a descriptor that was not kept.
    """

    segment: SegmentId
    """Its creator part is the sender."""
    nbytes: Nbytes
    """Size of the memory behind the descriptor."""
    writable: bool
    """Whether others may map it for writing."""
    memory: MaybeMemory = 0
    """Which block it is a use of; 0: it is used once."""
    path: MaybeName = ""
    """Its name in the file system, to be removed when no process needs it."""


@frame(Kind.FETCH)
class Fetch(FramePayload):
    """The sender wants a descriptor, and holds the segment from the answer on."""

    segment: SegmentId
    writable: bool
    """Whether it wants to write; otherwise the descriptor that comes is open for reading only."""
    memory: MaybeMemory = 0
    """Which memory it takes the segment for a use of; 0: it does not matter."""


@frame(Kind.HOLD)
class Hold(FramePayload):
    """The sender still maps the memory, as its `Release` said, and holds this use of it; no answer comes.

    To be sent before the sender of the handle learns that it has arrived.
    """

    segment: SegmentId
    memory: MemoryId
    writable: bool
    """Whether it maps it for writing."""


@frame(Kind.RELEASE)
class Release(FramePayload):
    """The sender ends its hold; harmless if there is none."""

    segment: SegmentId
    memory: MaybeMemory = 0
    """If the sender keeps it mapped: it may `Hold` its next use, and is sent `Unmap`."""


@frame(Kind.ALLOW_WRITE)
class AllowWrite(FramePayload):
    """The segment's creator lets others write from now on."""

    segment: SegmentId


@frame(Kind.FORGET)
class Forget(FramePayload):
    """The segment's creator ends its hold and does not want the memory back: no `Idle` comes later."""

    segment: SegmentId


@frame(Kind.FREED)
class Freed(FramePayload):
    """A memory's creator has returned it to the system: those that map it are sent `Unmap`."""

    memory: AnyMemory
    """0: the sender has no room for an array, and all others are sent `Unmap` of 0."""


@frame(Kind.INTEND)
class Intend(FramePayload):
    """The sender is about to make a name, which is removed whenever it dies."""

    path: Name


@frame(Kind.REMOVED)
class Removed(FramePayload):
    """The sender has removed a name of its own, or did not make it after all."""

    path: Name


@frame(Kind.FETCHED)
class Fetched(FramePayload):
    """The answer with the descriptor."""

    segment: SegmentId
    nbytes: Nbytes
    writable: bool
    """Whether the descriptor is open for writing."""


@frame(Kind.LOST)
class Lost(FramePayload):
    """The answer without one."""

    segment: SegmentId
    reason: LostReason


@frame(Kind.IDLE)
class Idle(FramePayload):
    """To its creator: no client holds a segment, the memory may be used again under a new id."""

    segment: SegmentId


@frame(Kind.DROP)
class Drop(FramePayload):
    """To its creator: no client holds it any more, and its memory must be returned to the system."""

    segment: SegmentId


@frame(Kind.ENDED)
class Ended(FramePayload):
    """To a client that keeps its memory mapped: no client holds it, it may be used again under a later id."""

    segment: SegmentId
    memory: MemoryId


@frame(Kind.UNMAP)
class Unmap(FramePayload):
    """To a client that keeps a memory mapped: its owner has returned it to the system."""

    memory: AnyMemory
    """0: to any: another one has no room, so that what is kept for reuse is to be returned."""


Notice: TypeAlias = Idle | Drop | Ended | Unmap | Fetched | Lost
"""What a client learns without having asked.

`Fetched`: a hold was granted after the client had stopped waiting (an interrupt); release it if unwanted.
`Lost`: the supervisor had no room for the descriptor of an own segment; send it with the next handle again.
"""
NOTICES: dict[Kind, Callable[[bytes], Notice]] = {m.kind: m.unpack for m in get_args(Notice)}
"""How each of them is read; `ProtocolError` if a payload is damaged."""


@frame(Kind.ANNOUNCE)
class Announce(FramePayload):
    """The sender's process has begun."""

    pid: Pid


@frame(Kind.WELCOME)
class Welcome(FramePayload):
    """To a process that another client has introduced: it is a client."""

    client: IntroducedNumber


# Payloads about messages in flight, and about processes that clients start, in the segment protocol.
#
# A message between two processes that no supervisor sees, in a pipe or a queue, refers to segments.  Its
# sender says ``POST``: a *parcel* holds them from then on.  Its receiver holds them itself and says
# ``TAKE``.  Every pipe has a *mailbox*: ``OPEN`` and ``CLOSE`` say which clients can read from it, and what
# lies in a mailbox that no client can read is dropped.
#
# ``INTRODUCE`` comes from a client that is about to start a process, with one end of a socketpair.  It is
# answered by ``WELCOME`` at the other end, which is the process's; that ``ANNOUNCE``s itself there, with its
# pidfd.

_POST = struct.Struct("<QQII")


@frame(Kind.POST)
class Post(FramePayload):
    """A message was made; its parcel holds what it refers to until it is taken."""

    parcel: SegmentId
    """Like a segment's: its creator part is the sender."""
    mailbox: int
    """Where it will lie; 0: in a connection without one."""
    segments: tuple[int, ...]
    """Ids of the segments that it refers to."""
    carried: tuple[int, ...] = ()
    """Mailboxes whose reading ends travel in it."""

    def pack(self) -> bytes:
        """Return the payload."""
        ids = (*self.segments, *self.carried)
        head = _POST.pack(self.parcel, self.mailbox, len(self.segments), len(self.carried))
        return head + struct.pack(f"<{len(ids)}Q", *ids)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        if len(payload) < _POST.size:
            raise ProtocolError(f"POST frame with {len(payload)} bytes of payload")
        parcel, mailbox, segments, carried = _POST.unpack_from(payload)
        if len(payload) != _POST.size + 8 * (segments + carried):
            raise ProtocolError(
                f"POST frame about {segments} segments and {carried} mailboxes with {len(payload)} bytes"
            )
        ids = struct.unpack_from(f"<{segments + carried}Q", payload, _POST.size)
        for value in (parcel, *ids, *([mailbox] if mailbox else [])):
            if not is_segment_id(value):
                raise ProtocolError(f"POST frame with {value:#x}, which is no id")
        return cls(parcel, mailbox, ids[:segments], ids[segments:])


@frame(Kind.TAKE)
class Take(FramePayload):
    """The sender has a message, and holds what it wants of what that refers to."""

    parcel: SegmentId


@frame(Kind.OPEN)
class Open(FramePayload):
    """The sender can read from a mailbox."""

    mailbox: SegmentId


@frame(Kind.CLOSE)
class CloseMailbox(FramePayload):
    """The sender no longer can."""

    mailbox: SegmentId


SegmentMessage = (
    Register | Fetch | Hold | Release | AllowWrite | Forget | Freed | Intend | Removed
    | Post | Take | Open | CloseMailbox
)  # fmt: skip
"""What a client sends to the supervisor about segments, and about messages in flight."""
MESSAGES: dict[Kind, Callable[[bytes], SegmentMessage]] = {m.kind: m.unpack for m in get_args(SegmentMessage)}
"""How each of them is read; `ProtocolError` if a payload is damaged."""


@frame(Kind.INTRODUCE)
class Introduction(FramePayload):
    """The sender is about to start a process, a client from now on; the supervisor's end is attached."""

    daemon: bool
    """Whether it ends with the sender; otherwise only with the root process."""
    inherits: bool
    """Whether it holds what the sender holds now: it is forked."""


@frame(Kind.MEET)
class Meet(FramePayload):
    """The sender wants to meet other guests as ranks of a world, over the socketpair that is attached."""

    place: Place


@frame(Kind.LEAVE_WORLD)
class LeaveWorld(FramePayload):
    """The sender leaves that world: what it holds now is held until all have left."""
