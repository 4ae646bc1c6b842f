"""Regions: segments that hold many small arrays.

Note [packed arrays]
--------------------
Each array of a region has an *extent*: its own root over its own bytes, so that a weak reference shows when
the last view of this array has died, as `mapping` does for a segment of one array.  The segment lives while
any extent does.

An extent is reused when its array has died, unless a handle of it was sent (`Region.mark_sent`): other
processes hold segments, not extents, so it is not known which of them still use it.  Such an extent is reused
with its region only; until then it is `wasted`, of which there may be so much (`region_set`).

Rights belong to a whole mapping, so arrays that ranks may write are in other regions than those they may
only read; letting them write to one of the latter means to move it (`Store.share` with ``for_all``).

Note [re-entrance]
------------------
The garbage collector may run a user's ``__del__`` anywhere, which may make and drop arrays.  Arrays made
there get dedicated segments (`Store`), and what ends there is one step each: an entry more in the list of
free extents.  The extents are the truth, the free ones follow from them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass

from nbparallel.sharing.memory.mapping import Lease, Mapping, Root

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
        self._living: set[Extent] = set()
        self._starts: list[int] = []
        """Where extents begin, ascending; some may have ended."""
        self._free_extents: list[tuple[int, int]] = [(mapping.nbytes // ALIGNMENT * ALIGNMENT, 0)]
        """(length, start), ascending; neighbours are not always joined."""
        self._loose = 0
        """Bytes freed since free extents were last joined."""
        self.wasted = 0
        """Bytes of extents whose arrays have died here, while other processes may use them."""

    @property
    def living(self) -> bool:
        """Whether any array of this process is here."""
        return bool(self._living)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.mapping.nbytes

    def may_hold(self, nbytes: int) -> bool:
        """Return False if `allocate` is sure to find no room."""
        free_extents = self._free_extents
        return (
            bool(free_extents) and free_extents[-1][0] >= nbytes
        ) or self._loose * JOIN_SHARE >= self.nbytes

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
        self._living.add(extent)
        root, extent.lease = self.mapping.part(extent.start, nbytes, self._dead)
        return root

    def extent(self, offset: int) -> Extent | None:
        """Return the extent that the byte at `offset` belongs to."""
        for at in range(bisect_right(self._starts, offset) - 1, -1, -1):
            extent = self._extents.get(self._starts[at])
            if extent is not None:
                return extent if offset < extent.stop else None
        return None

    def holds(self, root: object, offset: int) -> bool:
        """Return whether `root` is that of an extent which has its begin, end or a byte at `offset`."""
        extents = (self.extent(offset), self.extent(offset - 1))
        return any(
            extent is not None and extent.lease is not None and extent.lease() is root for extent in extents
        )

    def mark_sent(self, offset: int) -> None:
        """Record that a handle of the array with a byte at `offset` was sent; see note [packed arrays]."""
        extent = self.extent(offset)
        if extent is not None:
            extent.sent = True

    def mark_all_sent(self) -> None:
        """Record that every array was handed to another process, a forked child."""
        for extent in list(self._extents.values()):
            extent.sent = True

    def root(self, extent: Extent) -> Root:
        """Return the root of an extent, which may be used again after its array had died."""
        root = None if extent.lease is None else extent.lease()
        if root is not None:
            return root
        if extent not in self._living:
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
        elif extent in self._living:
            self.wasted += length
        self._living.discard(extent)

    def repair(self) -> None:
        """Check every extent: an operation was interrupted."""
        for extent in list(self._extents.values()):
            if not extent.used:
                self._vacate(extent)
        self._living = {extent for extent in self._extents.values() if extent.used}
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
