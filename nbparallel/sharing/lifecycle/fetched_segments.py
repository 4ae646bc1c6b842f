"""Fetched segments: memory that other processes made and this one has mapped.

Note [life of a fetched segment]
--------------------------------
It is fetched when its first array arrives, and released when the last one has died.  Its mapping may be kept
for later uses of the same memory (`mapping_cache`), which then cost a HOLD instead of a FETCH: no answer, no
mapping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nbparallel.errors import FileDescriptorLimitError, SharedMemoryFullError
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle.mapping_cache import MappingCache
from nbparallel.sharing.lifecycle.registration import Sessions
from nbparallel.sharing.lifecycle.segment import Segment, SegmentStatistics
from nbparallel.sharing.memory.mapping import Access, Mapping
from nbparallel.sharing.memory.process_limits import check_descriptor, check_mappings
from nbparallel.sharing.strategies import registry
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.segments import Hold, Release


class _Request(NamedTuple):
    """A segment to be mapped."""

    segment: int
    """Its id in the session that is asked."""
    nbytes: int
    """Size in bytes."""
    strategy: str
    """Name of the strategy that made it."""
    memory: int
    """The memory of which it has to be a use; 0: any."""


class FetchedSegments:
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
        self._requested: set[tuple[SegmentBroker, int]] = set()
        """Segments that are being fetched; left over after an interrupt."""
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
        self._requested.add((broker, wanted))
        writable = access is Access.WRITE
        if mapping is None:
            source = handle if segment is None else segment
            memory = source.memory if segment is None or segment.broker is broker else 0
            request = _Request(wanted, handle.segment_nbytes, source.strategy, memory)
            mapping = self._map(request, access, broker)
        elif segment is None:
            broker.send(Hold(wanted, handle.memory, writable))
        if segment is None:
            segment = Segment(wanted, mapping.nbytes, handle.strategy, writable=False, broker=broker)
            segment.memory = handle.memory
            self.by_id[broker, wanted] = segment
        self._requested.discard((broker, wanted))
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

    def _map(self, request: _Request, access: Access, broker: SegmentBroker) -> Mapping:
        try:
            return self._fetch_and_map(request, access, broker)
        except (FileDescriptorLimitError, SharedMemoryFullError):
            # The cache may hold what is missing.
            if not self.cache.trim(0.0):
                raise
        return self._fetch_and_map(request, access, broker)

    def _fetch_and_map(self, request: _Request, access: Access, broker: SegmentBroker) -> Mapping:
        segment, nbytes, memory = request.segment, request.nbytes, request.memory
        strategy = registry.strategy_of(request.strategy)
        check_mappings(self._count_mapped(), nbytes)
        writable = access is Access.WRITE
        # In one expression: no interrupt may fall between a descriptor's arrival and its being owned.
        source = strategy.adopt(broker.fetch(segment, writable=writable, memory=memory), nbytes)
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
        self._requested = {request for request in self._requested if request[0] is not broker}
        for key, segment in list(self.by_id.items()):
            if key[0] is broker:
                segment.broker = None
                self._detached.add(segment)
                self.by_id.pop(key, None)

    def repair(self) -> None:
        """Release what an interrupted `fetch` may hold."""
        for broker, wanted in list(self._requested):
            if (broker, wanted) not in self.by_id:
                self._sessions.notify(broker, Release(wanted))
        self._requested.clear()

    def statistics(self, broker: SegmentBroker | None) -> list[SegmentStatistics]:
        """Return a record of each segment, of all sessions or of one."""
        if broker is not None:
            return [s.statistics() for (source, _), s in self.by_id.items() if source is broker]
        return [segment.statistics() for segment in (*self.by_id.values(), *self._detached)]
