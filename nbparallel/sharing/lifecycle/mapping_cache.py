"""Mapping cache: mappings of other processes' memory that no array uses any more, for the next array there.

Note [kept mappings]
--------------------
Mapping a segment costs a request to the supervisor, a descriptor, and a page fault for every page that is
read.  Its owner will use the same memory again, for its next array of about the size, and the same array is
often sent again.  So a mapping outlives its last array for a while.  The *hold* does not: the segment ends as
if it had been unmapped, and its owner may write something else there.

An array may begin on a kept mapping only if its handle names a use of that memory which has not ended, as far
as is known here: ids of uses ascend, and the supervisor reports which have ended (`handle_notice`).  Rights
are those of the mapping, so one for writing never serves an array for reading.

Memory that its owner frees is unmapped as soon as this process acts on its notices (`unmap`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle import memory_pool
from nbparallel.sharing.lifecycle.memory_pool import PoolBudget
from nbparallel.sharing.lifecycle.segment import Segment
from nbparallel.sharing.memory.mapping import Access, Mapping
from nbparallel.sharing.memory.process_limits import spare
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.segments import Ended, Notice, Unmap

MAX_MAPPINGS = 16
"""Kept at most; fewer where few descriptors are allowed, of which some mappings cost one (`file_mapping`)."""


@dataclass(slots=True, eq=False)
class _CachedMapping:
    mapping: Mapping
    strategy: str
    first: int
    """Uses with a smaller id have ended."""
    since: float
    """When its last array died (monotonic clock, seconds)."""


class MappingCache:
    """Mappings by session, memory and right, the oldest first; not thread-safe, its store locks.

    Loops are over copies: a user's ``__del__``, run by the collector, may take a mapping anywhere.

    Parameters
    ----------
    budget : PoolBudget
        How many bytes of address space: the memory is its owner's, but stays until it is unmapped here.
    on_first : list of callables
        Called when the empty cache is about to keep a mapping: it has to be trimmed in time.
    """

    def __init__(self, budget: PoolBudget, on_first: list[Callable[[], None]]) -> None:
        self._budget = budget
        self._on_first = on_first
        self._cached: dict[tuple[SegmentBroker, int, Access], _CachedMapping] = {}

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def nbytes(self) -> int:
        """What is cached, in bytes."""
        return sum(cached.mapping.nbytes for cached in list(self._cached.values()))

    def put(self, broker: SegmentBroker, segment: Segment, mapping: Mapping) -> None:
        """Keep a mapping of a released segment; unmap the oldest ones if it gets too much."""
        if not self._budget.allows(mapping.nbytes):
            mapping.unmap()  # rather than everything that is older
            return
        if not self._cached:
            for notify in list(self._on_first):
                notify()
        key = (broker, segment.memory, mapping.access)
        if key in self._cached and self._cached[key].mapping is not mapping:
            self._unmap(key)
        self._cached[key] = _CachedMapping(mapping, segment.strategy, segment.id, time.monotonic())
        for oldest in list(self._cached):
            if self._budget.allows(self.nbytes) and len(self._cached) <= min(MAX_MAPPINGS, spare()):
                break
            self._unmap(oldest)

    def has(self, broker: SegmentBroker, memory: int, access: Access) -> bool:
        """Return whether a memory is kept mapped with a right."""
        return (broker, memory, access) in self._cached

    def take(self, broker: SegmentBroker, handle: ArrayHandle, access: Access) -> Mapping | None:
        """Take out the mapping that a handle's array may use, or return None."""
        key = (broker, handle.memory, access)
        cached = self._cached.get(key)
        if cached is None or handle.segment < cached.first or handle.strategy != cached.strategy:
            return None
        if cached.mapping.nbytes != handle.segment_nbytes:
            return None
        return cached.mapping if self._cached.pop(key, None) is cached else None

    def handle_notice(self, broker: SegmentBroker, notice: Notice) -> bool:
        """Act on a notice if it concerns memory that may be kept mapped, and return whether it does."""
        if isinstance(notice, Unmap):
            self.unmap(broker, notice.memory or None)
        elif isinstance(notice, Ended):
            for (whose, which, _), cached in list(self._cached.items()):
                if whose is broker and which == notice.memory:
                    cached.first = max(cached.first, notice.segment + 1)
        else:
            return False
        return True

    def unmap(self, broker: SegmentBroker, memory: int | None = None) -> None:
        """Unmap a memory, or all of a session."""
        for key in list(self._cached):
            if key[0] is broker and memory in (None, key[1]):
                self._unmap(key)

    def trim(self, keep_seconds: float | None = None) -> int:
        """Unmap what no array has needed for so long (`pool.KEEP_SECONDS`); return how many mappings."""
        limit = time.monotonic() - (memory_pool.KEEP_SECONDS if keep_seconds is None else keep_seconds)
        old = [key for key, cached in list(self._cached.items()) if cached.since <= limit]
        for key in old:
            self._unmap(key)
        return len(old)

    def seconds_left(self) -> float | None:
        """Return when there is something to `trim`; None if nothing is cached."""
        since = [cached.since for cached in list(self._cached.values())]
        return max(0.0, min(since) + memory_pool.KEEP_SECONDS - time.monotonic()) if since else None

    def _unmap(self, key: tuple[SegmentBroker, int, Access]) -> None:
        cached = self._cached.pop(key, None)
        if cached is not None:
            cached.mapping.unmap()
