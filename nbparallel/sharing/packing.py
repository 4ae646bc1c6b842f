"""Regions: segments that hold many arrays, filled from the front.

Note [packed arrays]
--------------------
All arrays of a region are views of its root, so the region's lease ends when the last of them dies: nothing
is counted here, and nothing is reused within a region that anybody can still see.  Rights belong to a whole
mapping, so arrays that ranks may write lie in other regions than those they may only read; letting them
write to one of the latter means to move it (`Store.share` with ``for_all``).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from nbparallel.sharing.mapping import Mapping, Root

ALIGNMENT = 64
"""Arrays begin at a multiple of this: a cache line, and what vector units like."""


@dataclass(slots=True)
class Region:
    """One segment that is being filled."""

    mapping: Mapping
    """The owner's; whether it is alive is the arrays' business."""
    starts: list[int] = field(default_factory=list)
    """Where each array begins, in bytes, ascending."""
    end: int = 0
    """One past the last array's last byte."""

    def take(self, nbytes: int) -> Root | None:
        """Return room for an array; None if there is not enough, or all arrays here have died."""
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        root = self.mapping.living_root()
        if root is None or start + nbytes > self.mapping.nbytes:
            return None
        self.starts.append(start)
        self.end = start + nbytes
        return root[start : self.end]

    def start_of(self, offset: int) -> int:
        """Return where the array begins that has a byte at `offset`."""
        return self.starts[max(0, bisect_right(self.starts, offset) - 1)]


class Regions:
    """The regions of one process that have room, one for each strategy and right; its store locks."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, bool], Region] = {}

    def take(self, strategy: str, nbytes: int, *, writable: bool) -> Root | None:
        """Return room for an array in the open region, or None if a new region is needed."""
        region = self._open.get((strategy, writable))
        if region is None:
            return None
        room = region.take(nbytes)
        if room is None:
            del self._open[strategy, writable]
        return room

    def open(self, strategy: str, region: Region, *, writable: bool) -> None:
        """Fill `region` from now on."""
        self._open[strategy, writable] = region
