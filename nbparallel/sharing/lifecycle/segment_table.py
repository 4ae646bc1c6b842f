"""Segment table: the segments that one process uses, and its pending releases.

Note [interrupts]
-----------------
A KeyboardInterrupt may fall anywhere.  So a dead root or a notice is taken off its queue only after
everything has been done about it, all of that may be done twice, and `locked` sets `doubtful` when an
exception passes: the next operation then begins by checking every segment (`SegmentTable.repair`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import cast

from nbparallel.errors import (
    LET_WRITE,
    ChannelClosedError,
    FileDescriptorLimitError,
    InvalidHandleError,
    ReadOnlyArrayError,
    SharedMemoryFullError,
)
from nbparallel.sharing.lifecycle.exported_segments import (
    ExportedSegments,
    MemoryPool,
    Sessions,
)
from nbparallel.sharing.lifecycle.imported_segments import MAX_MAPPINGS, ImportedSegments, MappingCache
from nbparallel.sharing.lifecycle.segment import (
    AddressMap,
    ArrayLocation,
    Block,
    Inherited,
    Region,
    Segment,
    SegmentBroker,
    SegmentStatistics,
    lost,
)
from nbparallel.sharing.memory.mapping import Access, Content, Lease, Mapping, RetryQueue, Root
from nbparallel.sharing.memory.memory_limits import check_descriptor, check_mappings, descriptor_limit
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.strategies.strategy import Strategy
from nbparallel.wire.name_updates import ArrayHandle
from nbparallel.wire.segments import Drop, Fetched, Forget, Intend, Lost, Notice, Release, Unmap, creator_of


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
        self.cache = MappingCache(pool.budget, MAX_MAPPINGS, pool.on_first)
        self.fetched = ImportedSegments(self.sessions, self.cache, lambda: self.mapped, self.collect)
        self._by_mapping: dict[Mapping, Segment] = {}
        self._address_map = AddressMap()
        self._dead = RetryQueue[Lease]()
        self._notices = RetryQueue[tuple[SegmentBroker, Notice]]()
        self.doubtful = False
        """Whether an operation was interrupted; see note [interrupts]."""

    @property
    def mapped(self) -> int:
        """How many segments are mapped, but for the few of the cache."""
        return len(self._by_mapping) + len(self.pool)

    # Sessions

    def connect(self, broker: SegmentBroker, *, aside: bool = False) -> None:
        """Join a session, which from now on removes the names that exist already."""
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

    def add_region(self, block: Block, *, writable: bool, poolable: bool) -> Region:
        """Make a segment of a block of memory and let arrays be packed into it."""
        segment = self.own.add(block, writable=writable, poolable=poolable)
        region = segment.region = Region(block.mapping, self._dead)
        self._enter(segment, block.mapping)
        self.own.open_regions.setdefault((segment.strategy, writable), []).append(region)
        return region

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
        assert location is not None, "it was shared before"
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
        if segment.released and not segment.private:
            # A handle of it came back to its maker.
            if broker is None or broker not in segment.registered:
                raise lost(segment.id)
            # An IDLE that is under way is invalid then; the broker sees to it.
            os.close(broker.fetch(segment.id, writable=True))
        if access is Access.PRIVATE:
            mapping = registry.strategy_of(segment.strategy).map(block.source, Access.PRIVATE)
            segment.private.add(mapping)
            return self._begin(segment, mapping), 0
        segment.released = False
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

    # Forked children

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
                segment.region.mark_sent()
            session_id = self.own.register(segment, broker)
            if mapping.access is not Access.PRIVATE:
                inherited.append((session_id, segment, mapping))
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
        own = segment.block if segment.block is not None and mapping is segment.block.mapping else None
        if own is not None:
            segment.released = True
            self.own.close_region(segment)
            if segment.id in self.own.posted and not own.source.path:
                self.own.unused[segment.id] = segment
        else:
            segment.private.discard(mapping)
            if segment.mappings.get(mapping.access) is mapping:
                del segment.mappings[mapping.access]
        self._release_unused(segment)
        # The pool may have handed the memory out already: to a user's __del__, run by the collector.
        if self._by_mapping.get(mapping) is segment:
            self._by_mapping.pop(mapping, None)
        if own is None:
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
            if segment.block is not None and not segment.released:
                mappings.append(segment.block.mapping)
            for mapping in mappings:
                if not segment.used_through(mapping):
                    self._end(segment, mapping)
            self._release_unused(segment)
        self.own.repair()
        self.doubtful = False

    # Memory kept for reuse

    def trim(self, keep_seconds: float | None = None) -> int:
        """Release what has been kept for so long (`exported_segments.KEEP_SECONDS`); return the bytes."""
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


# Allocation: memory for a new array, from the pool, a region or the system.

PATIENCE_SECONDS = 0.2
"""Time within which memory that no other process holds is returned, if the supervisor is not very busy."""
PAUSE_SECONDS = 0.0001
"""Between two polls."""
WORTH_SECONDS = 5e-12
"""Wait for each byte that may be returned: 1/50 of what it takes to allocate and touch it."""
WORTH_NBYTES = 16 << 20
"""Smaller memory is not waited for."""
FIRST_NBYTES = 1 << 20
"""Of the first region: reserving it takes 0.1 ms, and ten arrays cost no more."""
MOST_WASTED_NBYTES = 32 << 20
"""Memory of dead arrays that living ones may keep from reuse (or half of all regions, if that is more).
Beyond that small arrays get dedicated segments, which are freed one by one."""
DEDICATED_SHARE = 8
"""Dedicated segments may use 1/8 of a process's descriptors; beyond that small arrays are packed again."""


def await_return(table: SegmentTable, nbytes: int, strategy: str) -> Block | None:
    """Return pooled memory, also if other processes are just releasing it; None if there is none.

    A program that deletes a large array and makes the next is often quicker than the ranks' notice that they
    do not use it any more.
    """
    limit = time.monotonic() + nbytes * WORTH_SECONDS
    while True:
        table.collect()
        block = table.pool.take(nbytes, strategy)
        if block is not None or nbytes < WORTH_NBYTES or time.monotonic() >= limit:
            return block
        if not table.pool.budget.allows(nbytes, nbytes):
            return None  # it will not be kept
        if not any(table.pool.fits(away, nbytes, strategy) for away in table.own.released):
            return None
        time.sleep(PAUSE_SECONDS)


class Allocator:
    """Makes arrays' memory of one strategy and right; not thread-safe, the store locks."""

    def __init__(self, table: SegmentTable, strategy: Strategy, *, writable: bool) -> None:
        self._table, self._strategy, self._writable = table, strategy, writable
        self._regions = table.own.open_regions.setdefault((strategy.name, writable), [])

    def dedicated(self, nbytes: int, content: Content | None = None) -> tuple[Root, bool]:
        """Return the root of a dedicated segment, and whether it is fresh: zeros, or `content`."""
        block, fresh = self._block(nbytes, content)
        if not fresh:
            # It may have been written through its descriptor only.
            block.mapping.populate()
        poolable = self._strategy.reuses_memory
        return self._table.add(block, writable=self._writable, poolable=poolable), fresh

    def packed(self, nbytes: int) -> Root:
        """Return the root of an extent in a region of several arrays; its content is arbitrary.

        It is in the oldest region that has room, so that those needed for a while become empty.
        Where regions have become wasteful it is a dedicated segment, as long as there are few of those.
        """
        for region in self._regions:
            if (extent := region.allocate(nbytes)) is not None:
                return extent
        there = sum(region.nbytes for region in self._regions)
        wasted = sum(region.wasted for region in self._regions)
        few = self._table.mapped < descriptor_limit() // DEDICATED_SHARE
        if few and wasted > max(MOST_WASTED_NBYTES, there // 2):
            return self.dedicated(nbytes)[0]
        block = self._region_block(nbytes, there)
        region = self._table.add_region(block, writable=self._writable, poolable=self._strategy.reuses_memory)
        extent = region.allocate(nbytes)
        assert extent is not None, "a new region has room for one array"
        return extent

    def _region_block(self, nbytes: int, there: int) -> Block:
        """Return memory for a region, as large as all others together, so that there are few of them.

        Where there is too little left, it is for this array alone.
        """
        wanted = max(there, FIRST_NBYTES, 2 * self._strategy.packs_below)
        try:
            return self._block(max(nbytes, min(wanted, self._strategy.region_nbytes)))[0]
        except SharedMemoryFullError:
            return self._block(nbytes)[0]

    def _block(self, nbytes: int, content: Content | None = None) -> tuple[Block, bool]:
        """Return memory, and whether it is fresh: zeros, or `content`."""
        table, name = self._table, self._strategy.name
        pooled = table.pool.take(nbytes, name)
        if pooled is None:
            # Only now: polling the sessions takes as long as all the rest.
            pooled = await_return(table, nbytes, name)
            table.trim()
        return (self._fresh_block(nbytes, content), True) if pooled is None else (pooled, False)

    def _fresh_block(self, nbytes: int, content: Content | None) -> Block:
        table = self._table
        try:
            return self._mapped_block(nbytes, content)
        except (SharedMemoryFullError, FileDescriptorLimitError) as error:
            # What is pooled, or just being released elsewhere, may be all that is missing.
            others = isinstance(error, SharedMemoryFullError) and table.sessions.make_room()
            waits = others or bool(table.own.released)
            if not table.cache.trim(0.0) + table.pool.trim(0.0) and not waits:
                raise
        deadline = time.monotonic() + PATIENCE_SECONDS * waits
        while time.monotonic() < deadline:
            try:
                return self._mapped_block(nbytes, content)
            except (SharedMemoryFullError, FileDescriptorLimitError):
                time.sleep(0.005)
                table.collect()  # what this process has kept mapped of theirs
                table.pool.trim(0.0)
        return self._mapped_block(nbytes, content)

    def _mapped_block(self, nbytes: int, content: Content | None) -> Block:
        intended: list[str] = []

        def intend(path: str) -> None:
            intended.append(path)
            self._table.sessions.intend(path)

        source = None
        check_mappings(self._table.mapped, nbytes)
        try:
            # messages pass parts, one behind the other; they use no strategy but our own, which take them
            source = self._strategy.create(nbytes, cast("memoryview | None", content), intend)
            check_descriptor(source.fd)
            return Block(source, self._strategy.map(source, Access.WRITE))
        except BaseException:
            if source is not None:
                source.close()
            for path in intended:
                self._table.sessions.removed(path)
            raise
