"""Segment: a shared block of memory with an identity, as one process knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from nbparallel.errors import SegmentLostError
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle.region import Region
from nbparallel.sharing.memory.mapping import Access, Lease, Mapping
from nbparallel.sharing.strategies.strategy import SegmentSource


class Phase(enum.Enum):
    """Phase in the life of an own segment; a fetched one is always `LIVE`."""

    LIVE = "live"
    """Arrays of this process use it."""
    RELEASED = "released"
    """No array here does, but other processes may still."""


@dataclass(slots=True, eq=False)
class Block:
    """A segment's memory without its identity: what is reused."""

    source: SegmentSource
    """Its descriptor."""
    mapping: Mapping
    """The owner's mapping for writing; no array uses it while the block is in the pool."""
    freed: float = field(default=0.0)
    """When it came into the pool (monotonic clock, seconds)."""
    memory: int = field(default=0)
    """Id over all its uses, that of the first; 0: there was none yet, or there will be only one."""
    for_all: bool = field(default=False)
    """Whether other processes could ever write to it under this id."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, a multiple of the page size."""
        return self.source.nbytes

    def close(self) -> None:
        """Return the memory to the system."""
        self.mapping.unmap()
        self.source.close()


@dataclass(slots=True, eq=False)
class Segment:
    """One segment: made here (`block` is set) or fetched from another process."""

    id: int
    """Creator's client number << 40 | serial."""
    nbytes: int
    """Size of the memory in bytes, a multiple of the page size."""
    strategy: str
    """Name of the strategy that made it."""
    writable: bool
    """Whether other processes may write to it (own), or this one may (fetched)."""
    block: Block | None = None
    """The memory, if this process made it."""
    broker: SegmentBroker | None = None
    """Session that it was fetched from, if another process made it; None once that session is over."""
    phase: Phase = Phase.LIVE
    """Only for own ones."""
    poolable: bool = True
    """False if its strategy reuses nothing, or a session that knew it ended: a dying rank might write."""
    registered: dict[SegmentBroker, int] = field(default_factory=dict)
    """Sessions that know it, and under which id (another one, if it came from a different session)."""
    not_kept: set[SegmentBroker] = field(default_factory=set)
    """Those of them that had no room for its descriptor."""
    mappings: dict[Access, Mapping] = field(default_factory=dict)
    """Mappings of a fetched segment that arrays use: at most one for each right."""
    region: Region | None = None
    """Its extents, if it is packed."""
    private: set[Mapping] = field(default_factory=set)
    """Copy-on-write mappings: each attach has its own."""
    memory: int = 0
    """Id of the memory of which it is a use, if there may be others; see `mapping_cache`."""
    inherited: bool = False
    """Whether this process has it from the one that it was forked from: it holds it until it ends."""

    @property
    def own(self) -> bool:
        """Whether this process made it."""
        return self.block is not None

    @property
    def used(self) -> bool:
        """Whether arrays of this process use it."""
        if self.private or self.inherited:
            return True
        return bool(self.mappings) if self.block is None else self.phase is Phase.LIVE

    @property
    def packed_read_only(self) -> bool:
        """Whether letting others write to an array here means to move it."""
        return self.region is not None and not self.writable

    def receive(self, block: Block, *, poolable: bool) -> None:
        """Become a use of a block of memory, of which there may be others later."""
        if (poolable or block.source.path) and not block.memory:
            # What has a name is used once, but the same array may be sent again.
            block.memory = self.id
        block.for_all |= self.writable
        self.block, self.poolable, self.memory = block, poolable, block.memory

    def reach(self) -> tuple[SegmentBroker, int]:
        """Return a session that knows a fetched segment, and its id there."""
        if self.broker is not None:
            return self.broker, self.id
        for broker, session_id in self.registered.items():
            return broker, session_id
        raise lost(self.id)

    def used_through(self, mapping: Mapping) -> bool:
        """Return whether arrays use this segment through `mapping`."""
        if mapping.living_root() is not None:
            return True
        return self.region is not None and mapping is self.region.mapping and self.region.living

    def outlives(self, lease: Lease, mapping: Mapping) -> bool:
        """Record the end of a lease; return whether arrays still use its mapping."""
        if self.region is not None:
            self.region.vacate(lease)
        return self.used_through(mapping)

    def mark_sent(self, offset: int) -> None:
        """Record that a handle of the array with a byte at `offset` was sent."""
        if self.region is not None:
            self.region.mark_sent(offset)

    def repair(self) -> None:
        """Check every array that is packed here: an operation was interrupted."""
        if self.region is not None:
            self.region.repair()

    @property
    def reachable(self) -> bool:
        """Whether other processes can be given it."""
        return self.block is not None or self.broker is not None or bool(self.registered)

    def statistics(self) -> SegmentStatistics:
        """Return a record of it, for people to read."""
        return SegmentStatistics(
            segment=self.id,
            nbytes=self.nbytes,
            strategy=self.strategy,
            own=self.own,
            phase=self.phase.value,
            writable=self.writable,
            sessions=len(self.registered) + (self.broker is not None),
            read_only=self.block is not None and self.block.mapping.access is Access.READ,
            path="" if self.block is None else self.block.source.path,
        )


def lost(segment: int) -> SegmentLostError:
    """Return the error for a segment that is not available, with the reasons."""
    return SegmentLostError(
        f"segment {segment:#x} is not there: its last array was deleted before this one was attached, or "
        "it belongs to a session that this process is not in"
    )


class Location(NamedTuple):
    """Segment and bytes of an array; a tuple, because every operation between ranks asks for two or three."""

    segment: int
    """The segment's id in the session."""
    start: int
    """Offset of the first byte that the array touches."""
    stop: int
    """Offset one past the last byte that it touches."""
    writable: bool
    """Whether this process may write there."""
    for_all: bool
    """Whether every process of the session may."""


class Inherited(NamedTuple):
    """One mapping that a forked child has from its parent."""

    segment_id: int
    """The segment's id in the session."""
    segment: Segment
    """As the parent knew it."""
    mapping: Mapping
    """Which arrays use."""


@dataclass(frozen=True, slots=True)
class SegmentStatistics:
    """Record of one segment, for people to read."""

    segment: int
    """Id; 0 for pooled memory, which has none until it is used again."""
    nbytes: int
    """Size of the memory in bytes."""
    strategy: str
    """Name of the strategy that made it."""
    own: bool
    """Whether this process made it."""
    phase: str
    """``live``, ``released`` (only others use it) or ``pooled``."""
    writable: bool
    """Whether others may write (own), or this process may (fetched)."""
    sessions: int
    """In how many sessions it is known."""
    read_only: bool = False
    """Whether no process may write, its maker included: a file that was opened for reading only."""
    path: str = ""
    """Its file, if this process made it and its strategy gives names."""
