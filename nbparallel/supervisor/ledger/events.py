"""What happens to segments, as the ledger is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ClientJoined:
    """A client is there."""

    client: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A client's process has ended, or its socket sent damage."""

    client: int


@dataclass(frozen=True, slots=True)
class Registered:
    """A client made a segment, and holds it."""

    client: int
    segment: int
    nbytes: int
    writable: bool
    """Whether others may write."""
    path: str = ""
    """Its name in the file system, or empty."""
    memory: int = 0
    """Which memory this is a use of; 0: one that is used once."""


@dataclass(frozen=True, slots=True)
class Intended:
    """A client is about to make a name."""

    client: int
    path: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A client has removed a name of its own, or did not make it after all."""

    client: int
    path: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A client wants to hold a segment."""

    client: int
    segment: int
    writable: bool
    """Whether it wants to write."""
    sequence: int
    """The question's number, for the answer."""
    memory: int = 0
    """Which memory it takes it for a use of; 0: any."""


@dataclass(frozen=True, slots=True)
class Held:
    """A client that keeps a memory mapped holds a use of it, and waits for no answer."""

    client: int
    segment: int
    memory: int
    writable: bool
    """Whether its mapping is for writing."""


@dataclass(frozen=True, slots=True)
class Released:
    """A client ends its hold."""

    client: int
    segment: int
    memory: int = 0
    """The memory, if the client keeps it mapped; else 0."""


@dataclass(frozen=True, slots=True)
class WriteAllowed:
    """A segment's creator lets others write."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A segment's creator ends its hold and does not want the memory back."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Freed:
    """A memory's creator has given it back to the system."""

    client: int
    memory: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Everything that had been sent before `Ledger.mark` returned `turn` has been read."""

    turn: int


Event: TypeAlias = (
    ClientJoined
    | ClientGone
    | Registered
    | Intended
    | Removed
    | Asked
    | Held
    | Released
    | WriteAllowed
    | Forgotten
    | Freed
    | Drained
)
