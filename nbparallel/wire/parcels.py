"""Payloads about messages in flight, and about processes that clients start, in the segment protocol.

A message between two processes that no supervisor sees, in a pipe or a queue, refers to segments.  Its sender
says ``POST``: a *parcel* holds them from then on.  Its receiver holds them itself and says ``TAKE``.  Every
pipe has a *mailbox*: ``OPEN`` and ``CLOSE`` say which clients can read from it, and what lies in a mailbox
that no client can read is dropped.

``INTRODUCE`` comes from a client that is about to start a process, with one end of a socketpair.  It is
answered by ``WELCOME`` at the other end, which is the process's; that ``ANNOUNCE``s itself there, with its
pidfd.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Self, get_args

from nbparallel.errors import ProtocolError
from nbparallel.wire.frames import Kind
from nbparallel.wire.segments import FramePayload, Place, SegmentId, frame, is_segment_id

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


ParcelMessage = Post | Take | Open | CloseMailbox
"""What a client sends to the supervisor about messages in flight."""
PARCEL_MESSAGES: dict[Kind, Callable[[bytes], ParcelMessage]] = {
    m.kind: m.unpack for m in get_args(ParcelMessage)
}
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
