"""Which regions of a process take arrays, and how large the next one is."""

from __future__ import annotations

from nbparallel.sharing.lifecycle.segment import Segment
from nbparallel.sharing.memory.mapping import Root
from nbparallel.sharing.strategies.strategy import Strategy

FIRST_NBYTES = 1 << 20
"""Of the first region: reserving it takes 0.1 ms, and ten arrays cost no more."""
MOST_WASTED_NBYTES = 32 << 20
"""Memory of dead arrays that living ones may keep from reuse (or half of all regions, if that is more).
Beyond that small arrays get dedicated segments, which are freed one by one."""
DEDICATED_SHARE = 8
"""Dedicated segments may use 1/8 of a process's descriptors; beyond that small arrays are packed again."""


class RegionSet:
    """The segments of one process that take arrays, by strategy and right; its store locks."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, bool], list[Segment]] = {}

    def allocate(self, strategy: Strategy, nbytes: int, *, writable: bool) -> Root | None:
        """Return an extent's root, in the oldest region that has room; None if a new region is needed.

        The oldest, so that regions that were needed only for a while become empty.
        """
        for segment in self._open.get((strategy.name, writable), ()):
            region = segment.region
            if region is not None and region.may_hold(nbytes):
                root = region.allocate(nbytes)
                if root is not None:
                    return root
        return None

    def next_nbytes(self, strategy: Strategy, nbytes: int, *, writable: bool) -> int:
        """Return how large the next region should be: as all others together, so that there are few."""
        there = sum(segment.nbytes for segment in self._open.get((strategy.name, writable), ()))
        wanted = max(there, FIRST_NBYTES, 2 * strategy.packs_below)
        return max(nbytes, min(wanted, strategy.region_nbytes))

    def wasteful(self, strategy: Strategy, *, writable: bool) -> bool:
        """Return whether arrays that have died keep too much memory."""
        regions = [segment.region for segment in self._open.get((strategy.name, writable), ())]
        wasted = sum(region.wasted for region in regions if region is not None)
        if wasted <= MOST_WASTED_NBYTES:
            return False
        return 2 * wasted > sum(region.nbytes for region in regions if region is not None)

    def open(self, segment: Segment) -> None:
        """Put arrays into `segment` from now on."""
        self._open.setdefault((segment.strategy, segment.writable), []).append(segment)

    def close(self, segment: Segment) -> bool:
        """Put no more arrays into `segment` (idempotent); return whether it was open."""
        taking = self._open.get((segment.strategy, segment.writable), [])
        if segment not in taking:
            return False
        taking.remove(segment)
        return True
