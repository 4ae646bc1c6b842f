"""Fetching: how this process comes to a mapping of another process's segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nbparallel.errors import FileDescriptorLimitError, SharedMemoryFullError
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle.mapping_cache import MappingCache
from nbparallel.sharing.memory.mapping import Access, Mapping
from nbparallel.sharing.memory.process_limits import check_descriptor, check_mappings
from nbparallel.sharing.strategies import registry
from nbparallel.wire.handles import ArrayHandle


class Wanted(NamedTuple):
    """What is to be mapped."""

    segment: int
    """The segment's id in the session that is asked."""
    nbytes: int
    """Size in bytes."""
    strategy: str
    """Name of the strategy that made it."""
    memory: int
    """Which memory it should be a use of; 0: it does not matter."""


class SegmentFetcher:
    """Maps segments, or finds that their memory is still mapped; not thread-safe, its store locks.

    Parameters
    ----------
    mapped : callable
        Returns how many segments this process maps.
    listen : callable
        Acts on what the sessions said.
    """

    def __init__(self, kept: MappingCache, mapped: Callable[[], int], listen: Callable[[], None]) -> None:
        self._kept, self._mapped, self._listen = kept, mapped, listen

    def still_mapped(self, handle: ArrayHandle, access: Access, broker: SegmentBroker) -> Mapping | None:
        """Return a kept mapping of a handle's memory, which is the caller's from now on, or None.

        The caller has to `hold` the segment.
        """
        if not handle.memory or not self._kept.has(broker, handle.memory, access):
            return None
        self._listen()  # its use may have ended, and so may the memory
        return self._kept.take(broker, handle, access)

    def map(self, wanted: Wanted, access: Access, broker: SegmentBroker) -> Mapping:
        """Ask for a segment, which this process holds from now on, and map it."""
        try:
            return self._map(wanted, access, broker)
        except (FileDescriptorLimitError, SharedMemoryFullError):
            # What is kept may be what is missing.
            if not self._kept.trim(0.0):
                raise
        return self._map(wanted, access, broker)

    def _map(self, wanted: Wanted, access: Access, broker: SegmentBroker) -> Mapping:
        segment, nbytes, memory = wanted.segment, wanted.nbytes, wanted.memory
        strategy = registry.strategy_of(wanted.strategy)
        check_mappings(self._mapped(), nbytes)
        writable = access is Access.WRITE
        # In one expression: no interrupt may fall between a descriptor's arrival and its being owned.
        source = strategy.adopt(broker.fetch(segment, writable=writable, memory=memory), nbytes)
        try:
            check_descriptor(source.fd)
            return strategy.map(source, access)
        finally:
            source.close()  # not left to a traceback that somebody keeps
