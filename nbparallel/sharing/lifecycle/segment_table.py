"""Segment table: the segments that one process uses, and its pending releases.

Note [interrupts]
-----------------
A KeyboardInterrupt may fall anywhere.  So a dead root or a notice is taken off its queue only after
everything has been done about it, all of that may be done twice, and `locked` sets `doubtful` when an
exception passes: the next operation then begins by checking every segment (`SegmentTable.repair`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbparallel.errors import LET_WRITE, ChannelClosedError, InvalidHandleError, ReadOnlyArrayError
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle.exported_segments import ExportedSegments, Sessions
from nbparallel.sharing.lifecycle.imported_segments import ImportedSegments, MappingCache
from nbparallel.sharing.lifecycle.memory_pool import MemoryPool
from nbparallel.sharing.lifecycle.segment import (
    Block,
    Inherited,
    Phase,
    Region,
    Segment,
    SegmentStatistics,
    lost,
)
from nbparallel.sharing.memory.array_layout import extent
from nbparallel.sharing.memory.mapping import Access, Lease, Mapping, RetryQueue, Root
from nbparallel.wire.name_updates import ArrayHandle
from nbparallel.wire.segments import Drop, Fetched, Forget, Intend, Lost, Notice, Release, Unmap, creator_of

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
        low, high = (0, x.nbytes) if x.flags.c_contiguous else extent(x.shape, x.strides, x.itemsize)
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


class SegmentTable:
    """Own and fetched segments, the addresses where they are mapped, and the arrays that have died.

    Notes
    -----
    Not thread-safe, its store locks.
    """

    def __init__(self, client: int, pool: MemoryPool) -> None:
        self.sessions = Sessions(self.disconnect)
        self.brokers = self.sessions.brokers
        self.pool = pool
        self.own = ExportedSegments(client, pool, self.sessions)
        self.cache = MappingCache(pool.budget, pool.on_first)
        self.fetched = ImportedSegments(self.sessions, self.cache, lambda: self.mapped, self.collect)
        self._by_mapping: dict[Mapping, Segment] = {}
        self._address_map = AddressMap()
        self._dead = RetryQueue[Lease]()
        self._notices = RetryQueue[tuple[SegmentBroker, Notice]]()
        self.doubtful = False
        """Whether an operation was interrupted; see note [interrupts]."""

    @property
    def mapped(self) -> int:
        """How many segments are mapped."""
        return len(self._by_mapping) + len(self.pool) + len(self.cache)

    # Sessions

    def connect(self, broker: SegmentBroker, *, aside: bool = False) -> None:
        """Join a session, which from now on removes the names that exist already (idempotent)."""
        if broker in self.brokers:
            return
        for segment in self.own.by_id.values():
            if segment.block is not None and segment.block.source.path:
                broker.send(Intend(segment.block.source.path))
        if aside:
            self.sessions.aside.append(broker)
        self.brokers.append(broker)

    def disconnect(self, broker: SegmentBroker) -> None:
        """Leave a session (idempotent); all arrays here stay valid."""
        if broker in self.brokers:
            self.brokers.remove(broker)
        if broker in self.sessions.aside:
            self.sessions.aside.remove(broker)
        if not self.brokers and not self.pool.lasting:
            self.pool.trim(0.0)
        self.fetched.disconnect(broker)
        self.own.disconnect(broker)

    def collect(self) -> None:
        """Receive the notices of all sessions, without waiting, and act on them."""
        for broker in list(self.brokers):
            try:
                for notice in broker.notices():
                    self._notices.append((broker, notice))
            except ChannelClosedError:
                self.disconnect(broker)
        self._handle_notices()

    def _handle_notices(self) -> None:
        while (first := self._notices.first()) is not None:
            broker, notice = first
            if broker in self.brokers:
                self._handle_notice(broker, notice)
            self._notices.finish(first)

    def _handle_notice(self, broker: SegmentBroker, notice: Notice) -> None:
        if isinstance(notice, Unmap) and not notice.memory:
            self.pool.refuse()
        if self.cache.handle_notice(broker, notice) or isinstance(notice, Unmap):
            return
        session_id = notice.segment
        segment = self.own.by_id.get(session_id) or self.fetched.by_id.get((broker, session_id))
        if isinstance(notice, Fetched):
            if segment is None or not segment.used:
                self.sessions.notify(broker, Release(session_id))
        elif segment is None:
            self.sessions.notify(broker, Forget(session_id))
        elif isinstance(notice, Lost):
            segment.not_kept.add(broker)
        elif segment.own and not segment.used and segment.registered.pop(broker, None) is not None:
            if isinstance(notice, Drop):
                segment.poolable = False
            else:
                self.sessions.notify(broker, Forget(session_id))
            self.own.retire(segment)

    # Arrays

    def add(self, block: Block, *, writable: bool, poolable: bool = True) -> Root:
        """Make a segment of a block of memory and return its root."""
        return self._begin(self.own.add(block, writable=writable, poolable=poolable), block.mapping)

    def add_region(self, block: Block, *, writable: bool, poolable: bool) -> None:
        """Make a segment of a block of memory and let arrays be packed into it."""
        segment = self.own.add(block, writable=writable, poolable=poolable)
        segment.region = Region(block.mapping, self._dead)
        self._enter(segment, block.mapping)
        self.own.regions.open(segment)

    def find(self, x: object) -> ArrayLocation | None:
        """Return where `x` is, or None if no other process could reach it there."""
        location = self._address_map.find(x)
        if location is not None and not location.segment.reachable:
            return None
        return location

    def packed_read_only(self, x: object) -> tuple[int, int] | None:
        """Return segment and first byte of `x` if it is packed with arrays that others may only read."""
        location = self.find(x)
        if location is None or location.segment.region is None or location.segment.writable:
            return None
        extent = location.segment.region.extent(location.start)
        return location.segment.id, location.start if extent is None else extent.start

    def allow_write(self, x: object) -> bool:
        """Let every process write to the memory of `x`, as `Store.allow_write`; return if that is new."""
        location = self.find(x)
        if location is None:
            raise ValueError("only an array in shared memory can be made writable for other processes")
        if location.segment.packed_read_only:
            raise ValueError("this array is packed with others: `x = nbp.share(x)` moves it")
        if location.segment.own and location.mapping.access is not Access.WRITE:
            raise ReadOnlyArrayError(
                'this array is a file that was opened for reading only: nbp.from_file(path, mode="r+"), '
                "or work on `x.copy()`"
            )
        if location.segment.own:
            changed = not location.segment.writable
            self.own.allow_write(location.segment)
            return changed
        if location.mapping.access is not Access.WRITE:
            raise ReadOnlyArrayError(
                f"this array is read-only on ranks: let them write with {LET_WRITE}, or work on `x.copy()`"
            )
        return False

    def register(self, location: ArrayLocation, broker: SegmentBroker | None) -> int:
        """Return the id under which a session knows the segment of an array whose handle is sent."""
        if location.segment.region is not None:
            location.segment.region.mark_sent(location.offset)
        return self.own.register(location.segment, broker)

    def root(self, handle: ArrayHandle, access: Access, broker: SegmentBroker | None) -> tuple[Root, int]:
        """Return a root with the handle's array, and where it begins in the segment; fetched if needed."""
        self._handle_notices()
        made_here = creator_of(handle.segment) == self.own.client
        if made_here:
            segment = self.own.by_id.get(handle.segment)
        else:
            segment = None if broker is None else self.fetched.by_id.get((broker, handle.segment))
        if segment is None and made_here and self.own.gave_up and broker is not None:
            # A message may have held it longer than this process: it is fetched, as another's.
            handle = handle._replace(memory=0)
            made_here, segment = False, self.fetched.by_id.get((broker, handle.segment))
        if segment is None:
            if made_here or broker is None:
                raise lost(handle.segment)
            return self._begin(*self.fetched.fetch(None, handle, access, broker, handle.segment)), 0
        if segment.nbytes != handle.segment_nbytes:
            raise InvalidHandleError(
                f"a handle says {handle.segment_nbytes} bytes, segment {segment.id:#x} has {segment.nbytes}"
            )
        if segment.block is not None:
            return self._own_root(segment, segment.block, handle.offset, access, broker)
        mapping = segment.mappings.get(access)
        root = None if mapping is None else mapping.living_root()
        if root is None:
            root = self._begin(*self.fetched.fetch(segment, handle, access, *segment.reach()))
        return root, 0

    def _own_root(
        self, segment: Segment, block: Block, offset: int, access: Access, broker: SegmentBroker | None
    ) -> tuple[Root, int]:
        region = segment.region
        extent = None if region is None else region.extent(offset)
        if region is not None and extent is None:
            raise lost(segment.id)
        if segment.phase is Phase.RELEASED and not segment.private:
            self.own.hold_again(segment, broker)
        if access is Access.PRIVATE:
            return self._begin(segment, self.own.map_private(segment, block)), 0
        segment.phase = Phase.LIVE
        if region is None or extent is None:
            return self._begin(segment, block.mapping), 0
        self._enter(segment, block.mapping)
        return region.root(extent), extent.start

    def _begin(self, segment: Segment, mapping: Mapping) -> Root:
        """Return the root of a mapping; from now on `reap` finds its death."""
        self._enter(segment, mapping)
        return mapping.root(self._dead)

    def _enter(self, segment: Segment, mapping: Mapping) -> None:
        if mapping.access is not Access.PRIVATE:
            self._address_map.add(mapping, segment)
        self._by_mapping[mapping] = segment

    # Messages in flight, and forked children

    def mark_posted(self, segments: Iterable[int]) -> None:
        """Record that messages hold segments, and give up the oldest that only messages hold."""
        for identifier in segments:
            if identifier in self.own.by_id:
                self.own.posted.add(identifier)
        self.own.give_up_posted()

    def prepare_fork(self, broker: SegmentBroker) -> list[Inherited] | None:
        """Return the mappings that arrays use, with the segments as a session knows them: registered there.

        None: no memory is mapped at all, so that a child has nothing to hold.

        Nothing of it is used again under the child's eyes: its hold sees to segments, and in regions, which
        are reused array by array, all arrays count as sent.
        """
        if not self.mapped:
            return None
        inherited = []
        for mapping, segment in list(self._by_mapping.items()):
            if not segment.reachable:
                continue
            if segment.region is not None:
                segment.region.mark_all_sent()
            session_id = self.own.register(segment, broker)
            if mapping.access is not Access.PRIVATE:
                inherited.append(Inherited(session_id, segment, mapping))
        return inherited

    def inherit(self, inherited: Iterable[Inherited], broker: SegmentBroker) -> None:
        """Know the segments that a parent had; their ends are not looked for: the process holds them."""
        for identifier, parents, mapping in inherited:
            segment = self.fetched.by_id.get((broker, identifier))
            if segment is None:
                segment = Segment(
                    identifier, parents.nbytes, parents.strategy, parents.writable, broker=broker
                )
                segment.memory = parents.memory if identifier == parents.id else 0
                segment.inherited = True
                self.fetched.by_id[broker, identifier] = segment
            segment.mappings[mapping.access] = mapping
            self._enter(segment, mapping)

    # Deaths

    def reap(self) -> None:
        """Act on mappings whose last array has died."""
        while (lease := self._dead.first()) is not None:
            mapping = lease.mapping
            segment = None if mapping is None else self._by_mapping.get(mapping)
            if mapping is not None and segment is not None:
                if segment.region is not None:
                    segment.region.vacate(lease)
                if not segment.used_through(mapping):
                    self._end(segment, mapping)
            self._dead.finish(lease)

    def _end(self, segment: Segment, mapping: Mapping) -> None:
        """Take a mapping that no array uses out of the table (idempotent)."""
        self._address_map.remove(mapping)
        own = segment.block is not None and mapping is segment.block.mapping
        if own:
            segment.phase = Phase.RELEASED
            self.own.regions.close(segment)
            self.own.note_unused(segment)
        else:
            segment.private.discard(mapping)
            if segment.mappings.get(mapping.access) is mapping:
                del segment.mappings[mapping.access]
        self._release_unused(segment)
        # The pool may have handed the memory out already: to a user's __del__, run by the collector.
        if self._by_mapping.get(mapping) is segment:
            self._by_mapping.pop(mapping, None)
        if not own:
            self.fetched.release_mapping(segment, mapping)

    def _release_unused(self, segment: Segment) -> None:
        """Release a segment in all sessions if no array here uses it any more (idempotent)."""
        if segment.used:
            return
        for broker, session_id in list(segment.registered.items()):
            self.sessions.notify(broker, Release(session_id))
        if segment.own:
            self.own.retire(segment)
        else:
            self.fetched.release_segment(segment)
            for session_id in segment.registered.values():
                self.own.by_id.pop(session_id, None)

    def repair(self) -> None:
        """Check every segment: an operation was interrupted."""
        for segment in {*self.own.by_id.values(), *self.fetched.all}:
            mappings = [*segment.mappings.values(), *segment.private]
            if segment.region is not None:
                segment.region.repair()
            if segment.block is not None and segment.phase is Phase.LIVE:
                mappings.append(segment.block.mapping)
            for mapping in mappings:
                if not segment.used_through(mapping):
                    self._end(segment, mapping)
            self._release_unused(segment)
        self.own.repair()
        self.doubtful = False

    # Memory kept for reuse

    def trim(self, keep_seconds: float | None = None) -> int:
        """Release what has been kept for so long (`memory_pool.KEEP_SECONDS`); return the bytes."""
        self.cache.trim(keep_seconds)
        return self.pool.trim(keep_seconds)

    def seconds_left(self) -> float | None:
        """Return when there is something to `trim`; None if nothing is kept."""
        due = [seconds for what in (self.pool, self.cache) if (seconds := what.seconds_left()) is not None]
        return min(due, default=None)

    def statistics(self, broker: SegmentBroker | None, *, fetched: bool) -> tuple[SegmentStatistics, ...]:
        """Return own, fetched and pooled segments; with `broker`, of the fetched only that session's."""
        others = self.fetched.statistics(broker) if fetched else []
        return (*self.own.statistics(), *others, *self.pool.statistics())
