"""Segment: a shared block of memory with an identity, as one process knows it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nbparallel.errors import SegmentLostError
from nbparallel.sharing.memory import array_layout
from nbparallel.sharing.memory.mapping import Access, Lease, Mapping, Root
from nbparallel.sharing.strategies.strategy import SegmentSource
from nbparallel.wire.segments import FramePayload, Notice

# Regions: segments that hold many small arrays.
#
# Note [packed arrays]
# --------------------
# Each array of a region has an *extent*: its own root over its own bytes, so that a weak reference shows when
# the last view of this array has died, as `mapping` does for a segment of one array.  The segment lives while
# any extent does.
#
# An extent is reused when its array has died, unless a handle of it was sent (`Region.mark_sent`): other
# processes hold segments, not extents, so it is not known which of them still use it.  Such an extent is
# reused with its region only; until then it is `wasted`, of which there may be so much (`Allocator`).
#
# Rights belong to a whole mapping, so arrays that ranks may write are in other regions than those they may
# only read; letting them write to one of the latter means to move it (`Store.share` with ``for_all``).
#
# Note [re-entrance]
# ------------------
# The garbage collector may run a user's ``__del__`` anywhere, which may make and drop arrays.  Arrays made
# there get dedicated segments (`Store`), and what ends there is one step each: an entry more in the list of
# free extents.  The extents are the truth, the free ones follow from them.

ALIGNMENT = 64
"""Arrays begin at a multiple of this: a cache line, which suits vector units."""
JOIN_SHARE = 8
"""Neighbouring free extents are joined when 1/8 of a region was freed since the last time."""


@dataclass(slots=True, eq=False)
class Extent:
    """The bytes of one array in a region."""

    start: int
    """First byte."""
    stop: int
    """One past the last byte; both are multiples of `ALIGNMENT`."""
    lease: Lease | None = None
    """Of the array's root."""
    sent: bool = False
    """Whether a handle of it was sent."""

    @property
    def used(self) -> bool:
        """Whether an array of this process uses it."""
        return self.lease is not None and self.lease() is not None


class Region:
    """One segment that is being filled; not thread-safe, the store locks.

    Parameters
    ----------
    mapping : Mapping
        The owner's.
    dead : deque
        Where the ends of leases are appended.
    """

    def __init__(self, mapping: Mapping, dead: deque[Lease]) -> None:
        self.mapping = mapping
        self._dead = dead
        self._extents: dict[int, Extent] = {}
        self.living: set[Extent] = set()
        """Those that arrays of this process use."""
        self._starts: list[int] = []
        """Where extents begin, ascending; some may have ended."""
        self._free_extents: list[tuple[int, int]] = [(mapping.nbytes // ALIGNMENT * ALIGNMENT, 0)]
        """(length, start), ascending; neighbours are not always joined."""
        self._loose = 0
        """Bytes freed since free extents were last joined."""
        self.wasted = 0
        """Bytes of extents whose arrays have died here, while other processes may use them."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.mapping.nbytes

    def allocate(self, nbytes: int) -> Root | None:
        """Return the root of a new extent, its content arbitrary; None if there is not enough room."""
        length = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._loose * JOIN_SHARE >= self.nbytes and not (
            self._free_extents and self._free_extents[-1][0] >= length
        ):
            self.join()
        free_extents = self._free_extents
        if not free_extents or free_extents[-1][0] < length:
            return None
        free, start = free_extents.pop(bisect_left(free_extents, (length,)))
        while free < length:  # a smaller one came in between: see note [re-entrance]
            insort(free_extents, (free, start))
            free, start = free_extents.pop(bisect_left(free_extents, (length,)))
        if free > length:
            insort(free_extents, (free - length, start + length))
        extent = self._extents[start] = Extent(start, start + length)
        at = bisect_left(self._starts, start)
        if at == len(self._starts) or self._starts[at] != start:
            self._starts.insert(at, start)
        return self._enter(extent, nbytes)

    def _enter(self, extent: Extent, nbytes: int) -> Root:
        self.living.add(extent)
        root, extent.lease = self.mapping.part(extent.start, nbytes, self._dead)
        return root

    def extent(self, offset: int) -> Extent | None:
        """Return the extent that the byte at `offset` belongs to."""
        for at in range(bisect_right(self._starts, offset) - 1, -1, -1):
            extent = self._extents.get(self._starts[at])
            if extent is not None:
                return extent if offset < extent.stop else None
        return None

    def mark_sent(self, offset: int | None = None) -> None:
        """Record that a handle of the array with a byte at `offset` was sent, or that all arrays were."""
        for extent in list(self._extents.values()) if offset is None else [self.extent(offset)]:
            if extent is not None:
                extent.sent = True

    def root(self, extent: Extent) -> Root:
        """Return the root of an extent, which may be used again after its array had died."""
        root = None if extent.lease is None else extent.lease()
        if root is not None:
            return root
        if extent not in self.living:
            self.wasted -= extent.stop - extent.start
        return self._enter(extent, extent.stop - extent.start)

    def vacate(self, lease: Lease) -> None:
        """Free the extent of an array that has died (idempotent)."""
        extent = self._extents.get(lease.start)
        if extent is not None and extent.lease is lease:
            self._vacate(extent)

    def _vacate(self, extent: Extent) -> None:
        length = extent.stop - extent.start
        if not extent.sent:
            if self._extents.pop(extent.start, None) is not None:
                self._loose += length
                insort(self._free_extents, (length, extent.start))
        elif extent in self.living:
            self.wasted += length
        self.living.discard(extent)

    def repair(self) -> None:
        """Check every extent: an operation was interrupted."""
        for extent in list(self._extents.values()):
            if not extent.used:
                self._vacate(extent)
        self.living = {extent for extent in self._extents.values() if extent.used}
        self.wasted = sum(extent.stop - extent.start for extent in self._extents.values() if not extent.used)
        self.join()

    def join(self) -> None:
        """Join neighbouring free extents."""
        self._loose = 0
        extents = sorted((extent.start, extent.stop) for extent in list(self._extents.values()))
        free_extents, end = [], 0
        for start, stop in extents:
            if start > end:
                free_extents.append((start - end, end))
            end = stop
        if self.nbytes // ALIGNMENT * ALIGNMENT > end:
            free_extents.append((self.nbytes // ALIGNMENT * ALIGNMENT - end, end))
        self._starts, self._free_extents = [start for start, _ in extents], sorted(free_extents)


@dataclass(slots=True, eq=False)
class Block:
    """A segment's memory without its identity: what is reused."""

    source: SegmentSource
    """Its descriptor."""
    mapping: Mapping
    """The owner's mapping for writing; no array uses it while the block is in the pool."""
    since: float = field(default=0.0)
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
    released: bool = False
    """Of an own one: no array of this process uses it, but other processes may still."""
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
    """Id of the memory of which it is a use, if there may be others; see `MappingCache`."""
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
        return bool(self.mappings) if self.block is None else not self.released

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
        return self.region is not None and mapping is self.region.mapping and bool(self.region.living)

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
            phase="released" if self.released else "live",
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


Inherited = tuple[int, Segment, Mapping]
"""Of a forked child: a segment's id in the session, the segment as its parent knew it, a mapping of it."""


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


# Segment broker: the protocol by which a store registers, fetches and releases segments of a session.


class SegmentBroker(Protocol):
    """One session's exchange of segments, as seen from one process.

    Sharing does not know how the other processes are reached: `nbparallel.channel.SegmentClient` speaks
    to the supervisor, tests use an exchange within one process.

    Notes
    -----
    Implementations are thread-safe.  Every method raises `ChannelClosedError` when the session is gone.
    """

    @property
    def client(self) -> int:
        """Client number of this process in the session."""

    def send(self, message: FramePayload, fd: int | None = None) -> None:
        """Send a message of `wire.segments`, with a descriptor that the caller keeps; waits for no answer."""

    def fetch(self, segment: int, *, writable: bool, memory: int = 0) -> int:
        """Hold a segment and return a descriptor of it, which the caller closes.

        `memory` says which block of memory it is to be a use of; 0: it does not matter.

        Raises
        ------
        SegmentLostError
            Its memory is no longer there, or no answer came within the bound.
        ReadOnlyArrayError
            `writable` was asked for, and its creator does not allow that.
        FileDescriptorLimitError
            The supervisor or this process has no descriptor left.
        """

    def notices(self) -> Sequence[Notice]:
        """Return the notices that have come in since the last call, without waiting."""


# Address map: which mapping an address belongs to.

AnyArray = npt.NDArray[Any]
_interface_of: Any = np.ndarray.__array_interface__.__get__
_base_of: Any = np.ndarray.base.__get__
"""numpy's own, whatever a subclass makes of them: a traced array's base is another traced array."""


class ArrayLocation(NamedTuple):
    """Mapping and bytes of an array in this process."""

    mapping: Mapping
    """The mapping that holds all of its bytes."""
    segment: Segment
    """The segment that is mapped there."""
    offset: int
    """Offset in bytes of the element with all indices 0."""
    start: int
    """Offset of the first byte."""
    stop: int
    """Offset one past the last byte."""


class AddressMap:
    """Living mappings in order of address; not thread-safe, its store locks.

    An array is found by the addresses of its bytes, not by its chain of bases: so one that came through a
    memoryview, a tensor or `numpy.frombuffer` is found as well.
    """

    def __init__(self) -> None:
        # One list of (address, mapping, segment), which is replaced, never changed: an interrupt, a signal
        # handler, or a user's __del__ that calls us, never sees half of a change, and indices stay valid.
        # Addresses differ, so that comparing entries never compares the rest.
        self._entries: list[tuple[int, Mapping, Segment]] = []

    def add(self, mapping: Mapping, segment: Segment) -> None:
        """Enter a mapping (idempotent)."""
        while True:
            entries = self._entries
            at = bisect_left(entries, (mapping.address,))
            if at < len(entries) and entries[at][1] is mapping:
                return
            changed = [*entries[:at], (mapping.address, mapping, segment), *entries[at:]]
            if self._entries is entries:  # no other change in between: nothing is called from here on
                self._entries = changed
                return

    def remove(self, mapping: Mapping) -> None:
        """Remove a mapping (idempotent)."""
        while True:
            entries = self._entries
            at = bisect_left(entries, (mapping.address,))
            if at == len(entries) or entries[at][1] is not mapping:
                return
            changed = [*entries[:at], *entries[at + 1 :]]
            if self._entries is entries:
                self._entries = changed
                return

    def find(self, x: object) -> ArrayLocation | None:
        """Return where `x` is, or None if it is no array or in other memory."""
        entries = self._entries
        if not entries or not isinstance(x, np.ndarray):
            return None
        if x.size == 0:
            return self._find_empty(x)
        # Where nothing of it is written in Python, it takes half as long if that is not in the caches.
        address: int = _interface_of(x)["data"][0] if x.dtype.names is None else x.ctypes.data
        at = bisect_left(entries, (address + 1,)) - 1
        if at < 0:
            return None
        start, mapping, segment = entries[at]
        offset = address - start
        if offset >= mapping.nbytes:
            return None
        low, high = (
            (0, x.nbytes) if x.flags.c_contiguous else array_layout.extent(x.shape, x.strides, x.itemsize)
        )
        if offset + low < 0 or offset + high > mapping.nbytes:
            return None
        return ArrayLocation(mapping, segment, offset, offset + low, offset + high)

    def _find_empty(self, x: AnyArray) -> ArrayLocation | None:
        """Find an array without elements by what it is a view of: its address may lie behind a mapping."""
        root: Any = x
        while isinstance(base := _base_of(root), np.ndarray):
            root = base
        found = self.find(root) if root.size else None
        if found is None:
            return None
        offset = x.ctypes.data - found.mapping.address
        return ArrayLocation(found.mapping, found.segment, offset, offset, offset)
