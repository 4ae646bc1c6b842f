"""Timeline of a cell on one rank: start and end of its statements and operations; standard library only.

All times are those of ``time.monotonic_ns``, which is one clock for all processes of a machine
(``CLOCK_MONOTONIC``, clock_gettime(2)), so that those of different ranks can be compared.  A record travels
as tuples: a thousand frozen objects would take longer to pickle than the operations took.
"""

from __future__ import annotations

from dataclasses import dataclass

Noted = tuple[str, int, int, int, int, int, int, int, int, tuple[int, ...], bool]
"""The fields of an `OperationSpan`, in their order."""


@dataclass(frozen=True, slots=True)
class OperationSpan:
    """One operation between ranks, as one of them saw it."""

    name: str
    """As users call it."""
    line: int
    """Line of the cell as the gutter counts it; 0 unknown."""
    begin_ns: int
    """When it was called."""
    end_ns: int
    """When it returned or raised."""
    wait_ns: int
    """Of that, time in which this rank slept or gave its processor away until others came."""
    nbytes: int
    """Bytes that it moved or reduced."""
    peer: int
    """The root, the receiver or the source that was asked for; -1: none, or any."""
    awaited: int
    """The rank that was waited for last; -1: none, or not noticed."""
    number: int
    """Which collective of its group it was, in the epoch; 0: none, or not known."""
    group: tuple[int, ...]
    """The members of its group; empty: the world."""
    failed: bool
    """Whether it raised."""


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one rank noted of one cell."""

    rank: int
    """Its number."""
    pid: int
    """Its process."""
    began_ns: int
    """When the cell reached it."""
    ended_ns: int
    """When it had ended it."""
    noted_from_ns: int
    """Operations that ended earlier are only counted."""
    operations: int
    """How many operations the rank called, the omitted ones as well."""
    omitted: int
    """Operations that were only counted: too many, or too short and too many."""
    wait_ns: int
    """Time that it waited for other ranks, in all operations."""
    moving_ns: int
    """Time in the operations that were noted, waits excluded."""
    noted: tuple[Noted, ...]
    """The operations that were noted one by one, in order."""
    statements: tuple[tuple[int, int], ...]
    """Line and time of each statement of the cell that began, in order."""
    private_nbytes: int = 0
    """Bytes of large arrays of its own, in no shared memory, that it passed to reductions."""

    def spans(self) -> tuple[OperationSpan, ...]:
        """Return the operations that were noted one by one, in order."""
        return tuple(OperationSpan(*fields) for fields in self.noted)
