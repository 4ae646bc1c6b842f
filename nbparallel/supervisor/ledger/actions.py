"""Actions: what the ledger decides, for `SegmentServer` to perform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from nbparallel.wire.segments import FramePayload


@dataclass(frozen=True, slots=True)
class StoreDescriptor:
    """Keep the descriptor that came with the event, if none is kept yet."""

    segment: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the descriptor of a segment."""

    segment: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a name from the file system; it may never have been made, or be removed already."""

    path: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Send a descriptor."""

    client: int
    segment: int
    nbytes: int
    writable: bool
    """False: one that is open for reading only."""
    sequence: int
    fresh: bool
    """Whether the client did not hold it before."""


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a message without a descriptor: that there is none, or what becomes of a segment."""

    client: int
    message: FramePayload
    sequence: int = 0
    """Number of the question that it answers."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The client did what no client of ours does: end the connection."""

    client: int
    text: str


Action: TypeAlias = StoreDescriptor | Close | Unlink | Grant | Notify | Disconnect
