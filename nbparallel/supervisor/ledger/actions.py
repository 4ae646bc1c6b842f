"""What the ledger wants to be done; `SegmentServer` does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from nbparallel.wire.segments import LostReason


@dataclass(frozen=True, slots=True)
class StoreDescriptor:
    """Keep the descriptor that came with the event."""

    segment: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the descriptor of a segment."""

    segment: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a name from the file system; it may never have come to be, or be gone already."""

    path: str


@dataclass(frozen=True, slots=True)
class Unrecord:
    """Remove the owner record of a dead maker's names, none of which is left."""

    record: str


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
    """Tell a segment's creator that nobody holds it."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Tell a segment's creator to give its memory back to the system."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell who keeps a memory mapped that a use of it is over."""

    client: int
    segment: int
    memory: int


@dataclass(frozen=True, slots=True)
class Unmap:
    """Tell who keeps a memory mapped that it has no more use."""

    client: int
    memory: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The client did what no client of ours does: end the connection."""

    client: int
    text: str


Action: TypeAlias = (
    StoreDescriptor | Close | Unlink | Unrecord | Grant | Refuse | Idle | Drop | Ended | Unmap | Disconnect
)
