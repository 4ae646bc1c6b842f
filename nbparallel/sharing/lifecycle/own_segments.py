"""Own segments: memory that this process made, from its first array to its reuse.

Note [life of an own segment]
-----------------------------
``live``: arrays use it.  The last one dies; the next `SegmentTable.reap` finds that out.  If no session knows
the segment, its memory goes to the pool immediately.  Otherwise it is ``released``: each session gets
RELEASE, answers IDLE as soon as no other process holds it either, and gets FORGET; then the memory goes to
the pool.  What comes out of the pool gets a new id, so an old handle never finds new content.  If the handle
comes back before that (a rank sends the array to its maker), the hold is taken again by FETCH.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from nbparallel.errors import ChannelClosedError, FileDescriptorLimitError, SegmentLostError
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle.memory_pool import MemoryPool
from nbparallel.sharing.lifecycle.region_set import RegionSet
from nbparallel.sharing.lifecycle.registration import SegmentRegistrar, Sessions
from nbparallel.sharing.lifecycle.segment import Block, Phase, Segment, SegmentStatistics, lost
from nbparallel.sharing.memory.mapping import Access, Mapping
from nbparallel.sharing.strategies import registry
from nbparallel.wire.segments import Forget

MOST_POSTED = 16
"""Blocks kept that messages may hold and no array here uses: each costs a descriptor."""


class OwnSegments:
    """The segments that one process made, the regions among them, and the pool of their freed memory.

    Notes
    -----
    Not thread-safe, its store locks.
    """

    def __init__(self, client: int, pool: MemoryPool, sessions: Sessions) -> None:
        self.client = client
        self.pool = pool
        self.regions = RegionSet()
        self.by_id: dict[int, Segment] = {}
        """By our ids: segments made here, and fetched ones that another session knows by an id of ours."""
        self.posted: set[int] = set()
        """Our ids of segments that messages in flight hold, or held."""
        self.gave_up = False
        """Whether any of them was left to the supervisor."""
        self._unused: dict[int, Segment] = {}
        """Those of them that no array here uses, the oldest first; some may be used again, or retired."""
        self._sessions = sessions
        self.registrar = SegmentRegistrar(client, sessions, self.by_id)
        pool.close_block = self.free_block

    @property
    def released(self) -> list[Block]:
        """Memory that only other processes use, as far as is known here."""
        return [s.block for s in self.by_id.values() if s.phase is Phase.RELEASED and s.block is not None]

    def add(self, block: Block, *, writable: bool, poolable: bool) -> Segment:
        """Give a block of memory a new identity."""
        identifier = self.registrar.new_id()
        if block.for_all and not writable:
            # A process that keeps it mapped for writing must not reach what it may only read.
            self.registrar.unmap_elsewhere(block)
        segment = Segment(identifier, block.nbytes, block.source.strategy, writable)
        segment.receive(block, poolable=poolable)
        self.by_id[identifier] = segment
        return segment

    def hold_again(self, segment: Segment, broker: SegmentBroker | None) -> None:
        """Hold a released segment again: a handle of it came back to its maker."""
        if broker is None or broker not in segment.registered:
            raise lost(segment.id)
        # An IDLE that is under way is invalid then; the broker sees to it.
        os.close(broker.fetch(segment.id, writable=True))

    def map_private(self, segment: Segment, block: Block) -> Mapping:
        """Map a segment copy-on-write, once more for each array."""
        mapping = registry.strategy_of(segment.strategy).map(block.source, Access.PRIVATE)
        segment.private.add(mapping)
        return mapping

    def retire(self, segment: Segment) -> None:
        """Pool or free the memory of a segment that no session and no array needs (idempotent)."""
        if segment.used or segment.registered or self.by_id.pop(segment.id, None) is None:
            return
        block = segment.block
        if block is None:
            return
        if segment.poolable and (self._sessions.brokers or self.pool.lasting):
            self.pool.put(block)
            return
        path = block.source.path
        self.free_block(block)
        if path:
            self._sessions.removed(path)

    def give_up_posted(self) -> None:
        """Leave to the supervisor what too many messages hold and no array here uses.

        It is asked for a descriptor of each first: what it could not keep, this process must.
        """
        for identifier, segment in list(self._unused.items()):
            if identifier not in self.by_id:
                self.posted.discard(identifier)
            if identifier not in self.by_id or segment.phase is not Phase.RELEASED:
                self._unused.pop(identifier, None)
        for segment in list(self._unused.values())[:-MOST_POSTED]:
            self._unused.pop(segment.id, None)
            self._give_up(segment)

    def note_unused(self, segment: Segment) -> None:
        """Record that no array here uses a segment any more."""
        if segment.id in self.posted and segment.block is not None and not segment.block.source.path:
            self._unused[segment.id] = segment

    def _give_up(self, segment: Segment) -> None:
        try:
            for broker, session_id in segment.registered.items():
                os.close(broker.fetch(session_id, writable=True))
        except (SegmentLostError, FileDescriptorLimitError, ChannelClosedError):
            return  # its IDLE may be under way, or it was not kept
        self.gave_up = True
        for broker, session_id in list(segment.registered.items()):
            self._sessions.notify(broker, Forget(session_id))
        segment.registered.clear()
        segment.poolable = False
        self.retire(segment)

    def free_block(self, block: Block) -> None:
        """Return a block to the system, here and in every process that keeps it mapped (idempotent)."""
        block.close()
        self.registrar.unmap_elsewhere(block)

    def remove_ids(self, identifiers: Iterable[int]) -> None:
        """Remove ids that other sessions knew a fetched segment by."""
        for identifier in identifiers:
            self.by_id.pop(identifier, None)

    def disconnect(self, broker: SegmentBroker) -> None:
        """Retire what only a session that has ended used."""
        self.registrar.disconnect(broker)
        for session_id, segment in list(self.by_id.items()):
            segment.not_kept.discard(broker)
            if segment.registered.pop(broker, None) is None:
                continue
            if segment.own:
                # A rank that is being killed may write once more: never reuse what it could write to.
                segment.poolable = False
                self.retire(segment)
            else:
                self.by_id.pop(session_id, None)

    def renumber(self, client: int) -> None:
        """Give every segment an id of another client number, in no session.

        With a number other than 0 other processes may write to them from then on, as to all that a rank
        makes: only a notebook's arrays are protected from its ranks.
        """
        self.client = client
        self.registrar.renumber(client, self.pool.blocks)
        segments = list(self.by_id.values())
        self.by_id.clear()
        for segment in segments:
            segment.id = self.registrar.new_id()
            self.by_id[segment.id] = segment
            block = segment.block
            if client and not segment.writable and block is not None and block.mapping.access is Access.WRITE:
                was_open = segment.region is not None and self.regions.close(segment)
                segment.writable = True
                if was_open:
                    self.regions.open(segment)
            if block is not None:
                self.registrar.unmap_elsewhere(block)
                segment.receive(block, poolable=segment.poolable)

    def repair(self) -> None:
        """Complete what an interrupted `free_block` left undone."""
        used = [segment.block for segment in self.by_id.values() if segment.block is not None]
        self.registrar.repair([*used, *self.pool.blocks])

    def statistics(self) -> list[SegmentStatistics]:
        """Return a record of each segment that this process made and has not retired."""
        return [segment.statistics() for segment in self.by_id.values() if segment.own]
