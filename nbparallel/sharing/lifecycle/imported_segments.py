"""Fetched segments: memory that other processes made and this one has mapped.

Note [life of a fetched segment]
--------------------------------
It is fetched when its first array arrives, and released when the last one has died.  Its mapping may be kept
for later uses of the same memory (`MappingCache`), which then cost a HOLD instead of a FETCH: no answer, no
mapping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nbparallel.sharing.lifecycle.exported_segments import KeptMemory, Sessions
from nbparallel.sharing.lifecycle.segment import Segment, SegmentBroker, SegmentStatistics
from nbparallel.sharing.memory.mapping import Access, Mapping
from nbparallel.sharing.memory.memory_limits import check_descriptor, check_mappings
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.strategies.strategy import Strategy
from nbparallel.wire.name_updates import ArrayHandle
from nbparallel.wire.segments import Ended, Hold, Notice, Release, Unmap

# Mapping cache: mappings of other processes' memory that no array uses any more, for the next array there.
#
# Note [kept mappings]
# --------------------
# Mapping a segment costs a request to the supervisor, a descriptor, and a page fault for every page that is
# read.  Its owner will use the same memory again, for its next array of about the size, and the same array is
# often sent again.  So a mapping outlives its last array for a while.  The *hold* does not: the segment ends
# as if it had been unmapped, and its owner may write something else there.
#
# An array may begin on a kept mapping only if its handle names a use of that memory which has not ended, as
# far as is known here: ids of uses ascend, and the supervisor reports which have ended (`handle_notice`).
# Rights are those of the mapping, so one for writing never serves an array for reading.
#
# Memory that its owner frees is unmapped as soon as this process acts on its notices (`unmap`).

MAX_MAPPINGS = 16
"""Kept at most; fewer where few descriptors are allowed, of which some mappings cost one (`map_file`)."""


@dataclass(slots=True, eq=False)
class _CachedMapping:
    mapping: Mapping
    strategy: str
    first: int
    """Uses with a smaller id have ended."""
    nbytes: int
    since: float = 0.0
    """When its last array died (monotonic clock, seconds)."""


class MappingCache(KeptMemory[tuple[SegmentBroker, int, Access], _CachedMapping]):
    """Mappings by session, memory and right.

    Its budget is one of address space: the memory is its owner's, but stays until it is unmapped here.
    """

    def put(self, broker: SegmentBroker, segment: Segment, mapping: Mapping) -> None:
        """Keep a mapping of a released segment; unmap the oldest ones if it gets too much."""
        if not self._allows(mapping.nbytes):
            mapping.unmap()  # rather than everything that is older
            return
        key = (broker, segment.memory, mapping.access)
        if key in self._kept and self._kept[key].mapping is not mapping:
            self._drop(key)
        self._keep(key, _CachedMapping(mapping, segment.strategy, segment.id, mapping.nbytes))

    def has(self, broker: SegmentBroker, memory: int, access: Access) -> bool:
        """Return whether a memory is kept mapped with a right."""
        return (broker, memory, access) in self._kept

    def take(self, broker: SegmentBroker, handle: ArrayHandle, access: Access) -> Mapping | None:
        """Take out the mapping that a handle's array may use, or return None."""
        key = (broker, handle.memory, access)
        cached = self._kept.get(key)
        if cached is None or handle.segment < cached.first or handle.strategy != cached.strategy:
            return None
        if cached.nbytes != handle.segment_nbytes:
            return None
        return cached.mapping if self._kept.pop(key, None) is cached else None

    def handle_notice(self, broker: SegmentBroker, notice: Notice) -> bool:
        """Act on a notice if it concerns memory that may be kept mapped, and return whether it does."""
        if isinstance(notice, Unmap):
            self.unmap(broker, notice.memory or None)
        elif isinstance(notice, Ended):
            for (whose, which, _), cached in list(self._kept.items()):
                if whose is broker and which == notice.memory:
                    cached.first = max(cached.first, notice.segment + 1)
        else:
            return False
        return True

    def unmap(self, broker: SegmentBroker, memory: int | None = None) -> None:
        """Unmap a memory, or all of a session."""
        for key in list(self._kept):
            if key[0] is broker and memory in (None, key[1]):
                self._drop(key)

    def _close(self, kept: _CachedMapping) -> None:
        kept.mapping.unmap()


class ImportedSegments:
    """The segments that one process has from others, by session and id.

    Parameters
    ----------
    cache : MappingCache
        Mappings of released segments.
    count_mapped : callable
        Returns how many segments this process maps.
    collect : callable
        Acts on the notices that the sessions sent.

    Notes
    -----
    Not thread-safe, its store locks.
    """

    def __init__(
        self,
        sessions: Sessions,
        cache: MappingCache,
        count_mapped: Callable[[], int],
        collect: Callable[[], None],
    ) -> None:
        self.by_id: dict[tuple[SegmentBroker, int], Segment] = {}
        self.cache = cache
        self._detached: set[Segment] = set()
        """Segments whose session is over, while arrays use them."""
        self._sessions, self._count_mapped, self._collect = sessions, count_mapped, collect

    @property
    def all(self) -> set[Segment]:
        """Every segment, of living sessions and of those that have ended."""
        return {*self.by_id.values(), *self._detached}

    def fetch(
        self,
        segment: Segment | None,
        handle: ArrayHandle,
        access: Access,
        broker: SegmentBroker,
        wanted: int,
    ) -> tuple[Segment, Mapping]:
        """Hold a segment and map it, or reuse a cached mapping of its memory.

        Parameters
        ----------
        segment : Segment, optional
            Where it is known here already, with other rights.
        wanted : int
            Its id in the session of `broker`.
        """
        known = segment is None or (wanted == handle.segment and segment.memory == handle.memory)
        mapping = self._cached_mapping(handle, access, broker) if known else None
        writable = access is Access.WRITE
        try:
            if mapping is None:
                source = handle if segment is None else segment
                memory = source.memory if segment is None or segment.broker is broker else 0
                strategy = registry.strategy_of(source.strategy)
                request = partial(broker.fetch, wanted, writable=writable, memory=memory)
                mapping = self._map(request, handle.segment_nbytes, strategy, access)
            elif segment is None:
                broker.send(Hold(wanted, handle.memory, writable))
            if segment is None:
                segment = Segment(wanted, mapping.nbytes, handle.strategy, writable=False, broker=broker)
                segment.memory = handle.memory
                self.by_id[broker, wanted] = segment
        except BaseException:
            if (broker, wanted) not in self.by_id:  # an interrupt may have come with the answer
                self._sessions.notify(broker, Release(wanted))
            raise
        if access is Access.PRIVATE:
            segment.private.add(mapping)
        else:
            segment.writable |= writable
            segment.mappings[access] = mapping
        return segment, mapping

    def _cached_mapping(self, handle: ArrayHandle, access: Access, broker: SegmentBroker) -> Mapping | None:
        """Take a mapping of a handle's memory out of the cache; the caller has to `hold` the segment."""
        if not handle.memory or not self.cache.has(broker, handle.memory, access):
            return None
        self._collect()  # its use may have ended, and so may the memory
        return self.cache.take(broker, handle, access)

    def _map(self, request: Callable[[], int], nbytes: int, strategy: Strategy, access: Access) -> Mapping:
        check_mappings(self._count_mapped(), nbytes)
        # In one expression: no interrupt may fall between a descriptor's arrival and its being owned.
        source = strategy.adopt(request(), nbytes)
        try:
            check_descriptor(source.fd)
            return strategy.map(source, access)
        finally:
            source.close()  # not left to a traceback that may be kept

    def release_segment(self, segment: Segment) -> None:
        """End the hold of a segment that no array here uses (idempotent)."""
        if segment.broker is not None:
            self._sessions.notify(segment.broker, Release(segment.id, segment.memory))
            self.by_id.pop((segment.broker, segment.id), None)
        self._detached.discard(segment)

    def release_mapping(self, segment: Segment, mapping: Mapping) -> None:
        """Cache a mapping that no array uses, or unmap it."""
        broker = segment.broker
        lasting = segment.memory and mapping.access is not Access.PRIVATE
        if lasting and broker is not None and broker in self._sessions.brokers:
            self.cache.put(broker, segment, mapping)
        else:
            mapping.unmap()

    def disconnect(self, broker: SegmentBroker) -> None:
        """Detach the segments of a session that has ended; their arrays stay valid."""
        self.cache.unmap(broker)
        for key, segment in list(self.by_id.items()):
            if key[0] is broker:
                segment.broker = None
                self._detached.add(segment)
                self.by_id.pop(key, None)

    def statistics(self, broker: SegmentBroker | None) -> list[SegmentStatistics]:
        """Return a record of each segment, of all sessions or of one."""
        if broker is not None:
            return [s.statistics() for (source, _), s in self.by_id.items() if source is broker]
        return [segment.statistics() for segment in (*self.by_id.values(), *self._detached)]
