"""Regions: segments that hold many small arrays.

Note [packed arrays]
--------------------
Each array of a region has a *room*: its own root over its own bytes, so that a weak reference tells when the
last view of this array has died, as `mapping` does for a segment of one array.  The segment lives while
any room does.

A room is used again when its array has died, unless its handle was given out (`Region.show`): other processes
hold segments, not rooms, so nobody can say which of them still looks at it.  Such a room comes back with its
region only; until then it is `wasted`, of which there may be so much (`regions`).

Rights belong to a whole mapping, so arrays that ranks may write lie in other regions than those they may
only read; letting them write to one of the latter means to move it (`Store.share` with ``for_all``).

Note [re-entrance]
------------------
The garbage collector may run a user's ``__del__`` anywhere, which may make and drop arrays.  Arrays made
there get segments of their own (`Store`), and what ends there is one step each: an entry more in the list of
holes.  The rooms are the truth, the holes follow from them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass

from nbparallel.sharing.memory.mapping import Lease, Mapping, Root

ALIGNMENT = 64
"""Arrays begin at a multiple of this: a cache line, and what vector units like."""
JOIN_SHARE = 8
"""Neighbouring holes are joined when 1/8 of a region has come free since the last time."""


@dataclass(slots=True, eq=False)
class Extent:
    """One array's place in a region."""

    start: int
    """First byte."""
    stop: int
    """One past the last byte; both are multiples of `ALIGNMENT`."""
    lease: Lease | None = None
    """Of the array's root."""
    shown: bool = False
    """Whether a handle of it was given out."""

    @property
    def taken(self) -> bool:
        """Whether an array of this process looks at it."""
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
        self._rooms: dict[int, Extent] = {}
        self._living: set[Extent] = set()
        self._starts: list[int] = []
        """Where rooms begin, ascending; some may have ended."""
        self._holes: list[tuple[int, int]] = [(mapping.nbytes // ALIGNMENT * ALIGNMENT, 0)]
        """(length, start), ascending; neighbours are not always joined."""
        self._loose = 0
        """Bytes that have come free since holes were last joined."""
        self.wasted = 0
        """Bytes of rooms whose arrays have died here, while others may look at them."""

    @property
    def living(self) -> bool:
        """Whether any array of this process lies here."""
        return bool(self._living)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.mapping.nbytes

    def may_hold(self, nbytes: int) -> bool:
        """Return False if `take` is sure to find nothing."""
        holes = self._holes
        return (bool(holes) and holes[-1][0] >= nbytes) or self._loose * JOIN_SHARE >= self.nbytes

    def take(self, nbytes: int) -> Root | None:
        """Return room for an array, its content arbitrary; None if there is not enough."""
        length = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._loose * JOIN_SHARE >= self.nbytes and not (self._holes and self._holes[-1][0] >= length):
            self.join()
        holes = self._holes
        if not holes or holes[-1][0] < length:
            return None
        free, start = holes.pop(bisect_left(holes, (length,)))
        while free < length:  # a smaller one came in between: see note [re-entrance]
            insort(holes, (free, start))
            free, start = holes.pop(bisect_left(holes, (length,)))
        if free > length:
            insort(holes, (free - length, start + length))
        room = self._rooms[start] = Extent(start, start + length)
        at = bisect_left(self._starts, start)
        if at == len(self._starts) or self._starts[at] != start:
            self._starts.insert(at, start)
        return self._enter(room, nbytes)

    def _enter(self, room: Extent, nbytes: int) -> Root:
        self._living.add(room)
        root, room.lease = self.mapping.part(room.start, nbytes, self._dead)
        return root

    def room(self, offset: int) -> Extent | None:
        """Return the room that the byte at `offset` belongs to."""
        for at in range(bisect_right(self._starts, offset) - 1, -1, -1):
            room = self._rooms.get(self._starts[at])
            if room is not None:
                return room if offset < room.stop else None
        return None

    def holds(self, root: object, offset: int) -> bool:
        """Return whether `root` is that of a room which has its begin, end or a byte at `offset`."""
        rooms = (self.room(offset), self.room(offset - 1))
        return any(room is not None and room.lease is not None and room.lease() is root for room in rooms)

    def show(self, offset: int) -> None:
        """Take note that others learn of the array that has a byte at `offset`; see note [packed arrays]."""
        room = self.room(offset)
        if room is not None:
            room.shown = True

    def root(self, room: Extent) -> Root:
        """Return the root of a room, which may come back after it had ended."""
        root = None if room.lease is None else room.lease()
        if root is not None:
            return root
        if room not in self._living:
            self.wasted -= room.stop - room.start
        return self._enter(room, room.stop - room.start)

    def vacate(self, lease: Lease) -> None:
        """Take note that an array has died; again is fine."""
        room = self._rooms.get(lease.start)
        if room is not None and room.lease is lease:
            self._vacate(room)

    def _vacate(self, room: Extent) -> None:
        length = room.stop - room.start
        if not room.shown:
            if self._rooms.pop(room.start, None) is not None:
                self._loose += length
                insort(self._holes, (length, room.start))
        elif room in self._living:
            self.wasted += length
        self._living.discard(room)

    def repair(self) -> None:
        """Look at every room: something was interrupted."""
        for room in list(self._rooms.values()):
            if not room.taken:
                self._vacate(room)
        self._living = {room for room in self._rooms.values() if room.taken}
        self.wasted = sum(room.stop - room.start for room in self._rooms.values() if not room.taken)
        self.join()

    def join(self) -> None:
        """Make one hole of neighbouring ones."""
        self._loose = 0
        rooms = sorted((room.start, room.stop) for room in list(self._rooms.values()))
        holes, end = [], 0
        for start, stop in rooms:
            if start > end:
                holes.append((start - end, end))
            end = stop
        if self.nbytes // ALIGNMENT * ALIGNMENT > end:
            holes.append((self.nbytes // ALIGNMENT * ALIGNMENT - end, end))
        self._starts, self._holes = [start for start, _ in rooms], sorted(holes)
