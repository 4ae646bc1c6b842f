"""Payloads between a process of a script and the supervisor of its world, before and after they meet.

``JOIN`` (with a pidfd of the sender) is answered by ``JOINED`` (with the control segment and a pidfd of the
supervisor) once all have come, or by ``REFUSED``.  ``ABORT_JOIN``: the sender's time is over;
``LEAVE_WORLD``: it leaves the world in order.  In between the segment protocol is spoken
(`wire.segments`), as client number rank + 1.

Processes that are guests of a supervisor already meet there: ``MEET``, with a place and one end of a
socketpair, goes over their connection; over the socketpair the same is said.  They keep their client numbers,
and ``LEAVE_WORLD`` goes over their connection as well.  Most of it is JSON: nothing is unpickled here.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any, Self

from nbparallel.errors import ProtocolError
from nbparallel.wire.frames import Kind
from nbparallel.wire.identity import Process
from nbparallel.wire.segments import FramePayload, Seconds, frame


def client_of(rank: int) -> int:
    """Return the client number of a rank in the ledger of its world."""
    return rank + 1


@dataclass(frozen=True, slots=True)
class Join:
    """``JOIN``: rank, world size, versions and CPUs of the sender."""

    rank: int
    """The number that it was given."""
    world_size: int
    """How many it thinks there are."""
    versions: str
    """What it runs, in words; must be the same for all."""
    cpus: tuple[int, ...]
    """Numbers of the CPUs that it may use."""

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps([self.rank, self.world_size, self.versions, self.cpus]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        rank, world_size, versions, cpus = _fields(payload, 4, "JOIN")
        whole = [rank, world_size, *cpus] if isinstance(cpus, list) else [None]
        if not isinstance(versions, str) or not all(type(n) is int and 0 <= n < 1 << 31 for n in whole):
            raise ProtocolError(f"damaged JOIN frame: {payload[:80]!r}")
        return cls(rank, world_size, versions, tuple(cpus))


@dataclass(frozen=True, slots=True)
class Joined:
    """``JOINED``: the world is complete."""

    usable_cpus: int
    """CPUs that its processes may use together."""
    members: tuple[Process, ...]
    """Its processes, in rank order."""

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps([self.usable_cpus, [[p.pid, p.started] for p in self.members]]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        cpus, members = _fields(payload, 2, "JOINED")
        return cls(int(cpus), tuple(Process(int(pid), int(started)) for pid, started in members))


@frame(Kind.ABORT_JOIN)
class AbortJoin(FramePayload):
    """``ABORT_JOIN``: the sender has waited long enough."""

    seconds: Seconds
    """How long."""


class Reason(enum.StrEnum):
    """Why no world was formed; a word of the protocol."""

    LATE = "late"
    """The time-out of a process expired before all had joined."""
    WRONG = "wrong"
    """The processes do not fit together, or one of them ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """``REFUSED``: there will be no world."""

    reason: Reason
    """In one word."""
    text: str
    """In a sentence."""

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps([self.reason, self.text]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        reason, text = _fields(payload, 2, "REFUSED")
        return cls(Reason(reason), str(text))


def _fields(payload: bytes, count: int, name: str) -> list[Any]:
    try:
        fields = json.loads(payload)
    except ValueError:
        fields = None
    if not isinstance(fields, list) or len(fields) != count:
        raise ProtocolError(f"damaged {name} frame: {payload[:80]!r}")
    return fields
