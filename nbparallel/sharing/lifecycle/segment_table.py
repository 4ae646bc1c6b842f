"""Holdings: the segments that one process uses, and what it owes to its sessions for them.

Note [life of an own segment]
-----------------------------
``live``: arrays look at it.  The last one dies; the next `bury` notices.  If no session knows the segment
its memory goes to the pool at once.  Otherwise it is ``released``: each session is told RELEASE, answers
IDLE as soon as nobody else holds it either, and is told FORGET; then the memory goes to the pool.  What
comes out of the pool gets a new id, so an old handle never finds new content.  If the handle comes back
before that (a rank sends the array to its maker), the hold is taken again by FETCH.

Note [life of a fetched segment]
--------------------------------
It is fetched when its first array arrives, and released when the last one has died.  Its mapping may be kept
for later uses of the same memory (`kept`), which then cost a HOLD instead of a FETCH: no answer, no mapping.

Note [interrupts]
-----------------
A KeyboardInterrupt may fall anywhere.  So a dead root or a notice is taken off its queue only after
everything has been done about it, all of that may be done twice, and whoever lets an exception through sets
`doubtful`: the next operation then begins by looking at every segment.
"""

from __future__ import annotations

import os

from nbparallel.errors import ChannelClosedError, InvalidHandleError
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle.address_map import AddressMap, ArrayLocation
from nbparallel.sharing.lifecycle.fetching import SegmentFetcher, Wanted
from nbparallel.sharing.lifecycle.mapping_cache import MappingCache
from nbparallel.sharing.lifecycle.memory_pool import MemoryPool
from nbparallel.sharing.lifecycle.region import Region
from nbparallel.sharing.lifecycle.region_set import RegionSet
from nbparallel.sharing.lifecycle.registration import SegmentRegistrar, Sessions
from nbparallel.sharing.lifecycle.segment import Block, Phase, Segment, SegmentStatistics, lost
from nbparallel.sharing.memory.mapping import Access, Lease, Mapping, RetryQueue, Root
from nbparallel.sharing.strategies import registry
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.segments import Notice, NoticeKind, creator_of


class SegmentTable:
    """Segments by id and by address, their births and deaths; not thread-safe, its store locks."""

    def __init__(self, client: int, pool: MemoryPool) -> None:
        self.client = client
        self.pool = pool
        self.sessions = Sessions(self.disconnect)
        self.brokers = self.sessions.brokers
        pool.close_block = self.give_back
        self.kept = MappingCache(pool.budget, pool.on_first)
        self._own: dict[int, Segment] = {}
        """By our ids: segments made here, and fetched ones that another session knows by an id of ours."""
        self.registrar = SegmentRegistrar(client, self.sessions, self._own)
        self._fetched: dict[tuple[SegmentBroker, int], Segment] = {}
        self._orphans: set[Segment] = set()
        """Fetched ones whose session is over, while arrays look at them."""
        self._by_mapping: dict[Mapping, Segment] = {}
        self._address_map = AddressMap()
        self.regions = RegionSet()
        self._dead = RetryQueue[Lease]()
        self._notices = RetryQueue[tuple[SegmentBroker, Notice]]()
        self._fetching = SegmentFetcher(self.kept, lambda: self.mapped, self.collect)
        self._asked: set[tuple[SegmentBroker, int]] = set()
        """Segments that are being fetched; left over after an interrupt."""
        self.doubtful = False
        """Whether an operation was interrupted; see note [interrupts]."""

    # Sessions

    def connect(self, broker: SegmentBroker) -> None:
        """Join a session, which from now on sees to the names that exist already; again is fine."""
        if broker in self.brokers:
            return
        for segment in self._own.values():
            if segment.block is not None and segment.block.source.path:
                broker.intend(segment.block.source.path)
        self.brokers.append(broker)

    # Births

    def add(self, block: Block, *, writable: bool, poolable: bool = True) -> Root:
        """Give a block of memory an identity and return its root."""
        return self._begin(self._identify(block, writable=writable, poolable=poolable), block.mapping)

    def add_region(self, block: Block, *, writable: bool, poolable: bool) -> None:
        """Give a block of memory an identity and let arrays be packed into it."""
        segment = self._identify(block, writable=writable, poolable=poolable)
        segment.region = Region(block.mapping, self._dead)
        self._enter(segment, block.mapping)
        self.regions.open(segment)

    def _identify(self, block: Block, *, writable: bool, poolable: bool) -> Segment:
        identifier = self.registrar.new_id()
        if block.for_all and not writable:
            # Who keeps it mapped for writing must not reach what may only be read.
            self.registrar.freed(block)
        segment = Segment(identifier, block.nbytes, block.source.strategy, writable)
        segment.receive(block, poolable=poolable)
        self._own[identifier] = segment
        return segment

    def find(self, x: object) -> ArrayLocation | None:
        """Return where `x` lies, or None if nobody else could reach it there."""
        place = self._address_map.find(x)
        if place is not None and not place.segment.reachable:
            return None
        return place

    def show(self, place: ArrayLocation, broker: SegmentBroker | None) -> int:
        """Return the id under which a session knows the segment of an array whose handle goes out."""
        place.segment.show(place.offset)
        return self.registrar.register(place.segment, broker)

    def root(self, handle: ArrayHandle, access: Access, broker: SegmentBroker | None) -> tuple[Root, int]:
        """Return a root with the handle's array, and where it begins in the segment; fetched if needed."""
        self._heed_all()
        own_id = creator_of(handle.segment) == self.client
        if own_id:
            segment = self._own.get(handle.segment)
        else:
            segment = None if broker is None else self._fetched.get((broker, handle.segment))
        if segment is None:
            if own_id or broker is None:
                raise lost(handle.segment)
            return self._fetch(None, handle, access, broker, handle.segment), 0
        if segment.nbytes != handle.segment_nbytes:
            raise InvalidHandleError(
                f"a handle says {handle.segment_nbytes} bytes, segment {segment.id:#x} has {segment.nbytes}"
            )
        if segment.block is not None:
            return self._own_root(segment, segment.block, handle.offset, access, broker)
        mapping = segment.mappings.get(access)
        root = None if mapping is None else mapping.living_root()
        if root is None:
            root = self._fetch(segment, handle, access, *segment.reach())
        return root, 0

    def _own_root(
        self,
        segment: Segment,
        block: Block,
        offset: int,
        access: Access,
        broker: SegmentBroker | None,
    ) -> tuple[Root, int]:
        region = segment.region
        extent = None if region is None else region.extent(offset)
        if region is not None and extent is None:
            raise lost(segment.id)
        if segment.phase is Phase.RELEASED and not segment.private:
            if broker is None or broker not in segment.registered:
                raise lost(segment.id)
            # The hold is taken again.  An IDLE that is under way is void then; the broker sees to it.
            os.close(broker.fetch(segment.id, writable=True))
        if access is Access.PRIVATE:
            mapping = registry.strategy_of(segment.strategy).map(block.source, access)
            segment.private.add(mapping)
            return self._begin(segment, mapping), 0
        segment.phase = Phase.LIVE
        if region is None or extent is None:
            return self._begin(segment, block.mapping), 0
        self._enter(segment, block.mapping)
        return region.root(extent), extent.start

    def _fetch(
        self,
        segment: Segment | None,
        handle: ArrayHandle,
        access: Access,
        broker: SegmentBroker,
        wanted: int,
    ) -> Root:
        known = segment is None or (wanted == handle.segment and segment.memory == handle.memory)
        mapping = self._fetching.still_mapped(handle, access, broker) if known else None
        self._asked.add((broker, wanted))
        writable = access is Access.WRITE
        if mapping is None:
            source = handle if segment is None else segment
            memory = source.memory if segment is None or segment.broker is broker else 0
            asked = Wanted(wanted, handle.segment_nbytes, source.strategy, memory)
            mapping = self._fetching.map(asked, access, broker)
        elif segment is None:
            broker.hold(wanted, handle.memory, writable=writable)
        if segment is None:
            segment = Segment(wanted, mapping.nbytes, handle.strategy, writable=False, broker=broker)
            segment.memory = handle.memory
            self._fetched[broker, wanted] = segment
        self._asked.discard((broker, wanted))
        if access is Access.PRIVATE:
            segment.private.add(mapping)
        else:
            segment.writable |= writable
            segment.mappings[access] = mapping
        return self._begin(segment, mapping)

    def _begin(self, segment: Segment, mapping: Mapping) -> Root:
        """Return the root of a mapping; from now on its death is noticed."""
        self._enter(segment, mapping)
        return mapping.root(self._dead)

    def _enter(self, segment: Segment, mapping: Mapping) -> None:
        if mapping.access is not Access.PRIVATE:
            self._address_map.add(mapping, segment)
        self._by_mapping[mapping] = segment

    # Deaths

    def reap(self) -> None:
        """Act on mappings that no array looks at any more."""
        while (lease := self._dead.first()) is not None:
            mapping = lease.mapping
            segment = None if mapping is None else self._by_mapping.get(mapping)
            if mapping is not None and segment is not None and not segment.outlives(lease, mapping):
                self._end(segment, mapping)
            self._dead.finish(lease)

    def _end(self, segment: Segment, mapping: Mapping) -> None:
        self._address_map.remove(mapping)
        own, broker = segment.block is not None and mapping is segment.block.mapping, segment.broker
        if own:
            segment.phase = Phase.RELEASED
            self.regions.close(segment)
        else:
            segment.private.discard(mapping)
            if segment.mappings.get(mapping.access) is mapping:
                del segment.mappings[mapping.access]
        self._settle(segment)
        # The pool may have given the memory out again: to a user's __del__, run by the collector.
        if self._by_mapping.get(mapping) is segment:
            self._by_mapping.pop(mapping, None)
        if own:
            return
        if segment.memory and mapping.access is not Access.PRIVATE and broker in self.brokers:
            self.kept.put(broker, segment, mapping)
        else:
            mapping.unmap()

    def _settle(self, segment: Segment) -> None:
        """Tell everybody if no array here looks at a segment any more."""
        if segment.used:
            return
        for broker, known_as in list(segment.registered.items()):
            self.sessions.release(broker, known_as)
        if segment.own:
            self._retire(segment)
        else:
            self._leave(segment)

    @property
    def mapped(self) -> int:
        """How many segments are mapped."""
        return len(self._by_mapping) + len(self.pool) + len(self.kept)

    @property
    def released(self) -> list[Block]:
        """Memory of own segments that only others use, as far as is known here."""
        return [s.block for s in self._own.values() if s.phase is Phase.RELEASED and s.block is not None]

    def repair(self) -> None:
        """Look at every segment: something was interrupted."""
        for segment in {*self._own.values(), *self._fetched.values(), *self._orphans}:
            mappings = [*segment.mappings.values(), *segment.private]
            segment.repair()
            if segment.block is not None and segment.phase is Phase.LIVE:
                mappings.append(segment.block.mapping)
            for mapping in mappings:
                if not segment.shows(mapping):
                    self._end(segment, mapping)
            self._settle(segment)
        for broker, wanted in list(self._asked):
            if (broker, wanted) not in self._fetched:
                self.sessions.release(broker, wanted)
        self._asked.clear()
        used = [segment.block for segment in self._own.values() if segment.block is not None]
        self.registrar.repair([*used, *self.pool.blocks])
        self.doubtful = False

    def _leave(self, segment: Segment) -> None:
        """Give up a fetched segment."""
        if segment.broker is not None:
            self.sessions.release(segment.broker, segment.id, segment.memory)
            self._fetched.pop((segment.broker, segment.id), None)
        self._orphans.discard(segment)
        for known_as in segment.registered.values():
            self._own.pop(known_as, None)

    def _retire(self, segment: Segment) -> None:
        """Put an own segment's memory into the pool once no session and no array needs it."""
        if segment.used or segment.registered or self._own.pop(segment.id, None) is None:
            return
        block = segment.block
        if block is None:
            return
        if segment.poolable and (self.brokers or self.pool.lasting):
            self.pool.put(block)
            return
        path = block.source.path
        self.give_back(block)
        if path:
            self.sessions.removed(path)

    def give_back(self, block: Block) -> None:
        """Give a block back to the system, here and wherever it is kept mapped."""
        block.close()
        self.registrar.freed(block)

    def trim(self, keep_seconds: float | None = None) -> int:
        """Give back what has been kept for so long (`pool.KEEP_SECONDS`); return the bytes."""
        self.kept.trim(keep_seconds)
        return self.pool.trim(keep_seconds)

    def seconds_left(self) -> float | None:
        """Return when there is something to `trim`; None if nothing is kept."""
        due = [seconds for what in (self.pool, self.kept) if (seconds := what.seconds_left()) is not None]
        return min(due, default=None)

    # Sessions

    def disconnect(self, broker: SegmentBroker) -> None:
        """Leave a session; again is fine."""
        if broker in self.brokers:
            self.brokers.remove(broker)
        self.kept.drop(broker)
        self.registrar.disconnect(broker)
        if not self.brokers and not self.pool.lasting:
            self.pool.trim(0.0)
        self._asked = {asked for asked in self._asked if asked[0] is not broker}
        for known_as, segment in list(self._own.items()):
            if segment.registered.pop(broker, None) is None:
                continue
            if segment.own:
                # A rank that is being killed may write once more: never reuse what it could write to.
                segment.poolable = False
                self._retire(segment)
            else:
                self._own.pop(known_as, None)
        for key, segment in list(self._fetched.items()):
            if key[0] is broker:
                segment.broker = None
                self._orphans.add(segment)
                self._fetched.pop(key, None)

    def collect(self) -> None:
        """Act on what the sessions said."""
        for broker in list(self.brokers):
            try:
                for notice in broker.notices():
                    self._notices.append((broker, notice))
            except ChannelClosedError:
                self.disconnect(broker)
        self._heed_all()

    def _heed_all(self) -> None:
        while (first := self._notices.first()) is not None:
            broker, notice = first
            if broker in self.brokers:
                self._handle_notice(broker, notice)
            self._notices.finish(first)

    def _handle_notice(self, broker: SegmentBroker, notice: Notice) -> None:
        kind, known_as = notice.kind, notice.segment
        if self.kept.handle_notice(broker, notice):
            return
        segment = self._own.get(known_as) or self._fetched.get((broker, known_as))
        if kind is NoticeKind.STRAY:
            if segment is None or not segment.used:
                self.sessions.release(broker, known_as)
        elif segment is None:
            self.sessions.forget(broker, known_as)
        elif segment.own and not segment.used and segment.registered.pop(broker, None) is not None:
            if kind is NoticeKind.DROP:
                segment.poolable = False
            else:
                self.sessions.forget(broker, known_as)
            self._retire(segment)

    def statistics(self, broker: SegmentBroker | None, *, fetched: bool) -> tuple[SegmentStatistics, ...]:
        """Return own, fetched and pooled segments; with `broker`, of the fetched only that session's."""
        known = [segment for segment in self._own.values() if segment.own]
        if fetched:
            known += [s for (source, _), s in self._fetched.items() if broker is None or source is broker]
            known += self._orphans if broker is None else ()
        return (*(segment.statistics() for segment in known), *self.pool.statistics())
