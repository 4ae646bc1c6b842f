"""Which regions of a process take arrays, and how large the next one is."""

from __future__ import annotations

from nbparallel.sharing.lifecycle.segment import Segment
from nbparallel.sharing.memory.mapping import Root
from nbparallel.sharing.strategies.strategy import Strategy

FIRST_NBYTES = 1 << 20
"""Of the first region: reserving it takes 0.1 ms, and ten arrays cost no more."""
MOST_WASTED_NBYTES = 32 << 20
"""That arrays which stay may keep of those which have gone (or half of all regions, if that is more).  Beyond
that small arrays get segments of their own, which come back one by one."""
MOST_ALONE = 8
"""They may take 1/8 of what a process may have of descriptors; if there are more, they are packed again."""


class RegionSet:
    """The segments of one process that take arrays, by strategy and right; its store locks."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, bool], list[Segment]] = {}

    def take(self, strategy: Strategy, nbytes: int, *, writable: bool) -> Root | None:
        """Return room for an array, in the oldest region that has any; None if a new one is needed.

        The oldest, so that those that were needed only for a while come to their end.
        """
        for segment in self._open.get((strategy.name, writable), ()):
            region = segment.region
            if region is not None and region.may_hold(nbytes):
                root = region.take(nbytes)
                if root is not None:
                    return root
        return None

    def next_nbytes(self, strategy: Strategy, nbytes: int, *, writable: bool) -> int:
        """Return how large the next region should be: as all others together, so that there are few."""
        there = sum(segment.nbytes for segment in self._open.get((strategy.name, writable), ()))
        wanted = max(there, FIRST_NBYTES, 2 * strategy.packs_below)
        return max(nbytes, min(wanted, strategy.region_nbytes))

    def wasteful(self, strategy: Strategy, *, writable: bool) -> bool:
        """Return whether too much is kept of arrays that have gone."""
        regions = [segment.region for segment in self._open.get((strategy.name, writable), ())]
        wasted = sum(region.wasted for region in regions if region is not None)
        if wasted <= MOST_WASTED_NBYTES:
            return False
        return 2 * wasted > sum(region.nbytes for region in regions if region is not None)

    def open(self, segment: Segment) -> None:
        """Put arrays into `segment` from now on."""
        self._open.setdefault((segment.strategy, segment.writable), []).append(segment)

    def close(self, segment: Segment) -> bool:
        """Put nothing more into `segment`; return whether it took any, again is fine."""
        taking = self._open.get((segment.strategy, segment.writable), [])
        if segment not in taking:
            return False
        taking.remove(segment)
        return True
