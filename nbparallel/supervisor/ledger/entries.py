"""Entries of the ledger: segments, and messages about segments that are not registered yet."""

from __future__ import annotations

from dataclasses import dataclass

from nbparallel.wire.segments import Fetch, Hold


@dataclass(slots=True)
class Entry:
    """One segment."""

    nbytes: int
    """Size in bytes."""
    writable: bool
    """Whether others than its creator may write."""
    holders: set[int]
    """Clients that hold it, and numbers of parcels (`parcels`, note [parcels]); empty: its creator has been
    notified and may use the memory again."""
    unwanted: bool = False
    """Its creator does not want the memory back."""
    path: str = ""
    """Its name in the file system; empty: none, or no longer."""
    memory: int = 0
    """The memory that it is a use of; 0: one that no client keeps mapped."""
    died: bool = False
    """Whether its memory must not be used again, because of a holder that died."""


@dataclass(frozen=True, slots=True)
class Carry:
    """A parcel is to hold a segment."""

    segment: int


@dataclass(frozen=True, slots=True)
class Question:
    """A message about a segment that is not registered yet."""

    client: int
    """The client, or the number of a parcel."""
    message: Fetch | Hold | Carry
    sequence: int
    """Number of the question, for the answer."""
    turn: int
    """When it was read."""
