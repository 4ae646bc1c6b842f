"""Actions: what the ledger decides, for `SegmentServer` to perform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from nbparallel.wire.segments import LostReason


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
class Refuse:
    """Answer that there is none."""

    client: int
    segment: int
    reason: LostReason
    sequence: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Notify a segment's creator that no client holds it."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Request a segment's creator to return its memory to the system."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Notify a client that keeps a memory mapped that a use of it is over."""

    client: int
    segment: int
    memory: int


@dataclass(frozen=True, slots=True)
class Unmap:
    """Request a client to unmap a memory that will not be used again."""

    client: int
    memory: int
    """0: all that it keeps for reuse, and to free what is its own of that."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The client did what no client of ours does: end the connection."""

    client: int
    text: str


Action: TypeAlias = (
    StoreDescriptor | Close | Unlink | Grant | Refuse | Idle | Drop | Ended | Unmap | Disconnect
)
