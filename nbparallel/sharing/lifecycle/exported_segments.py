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

import itertools
import os
import time
from collections.abc import Callable

from nbparallel.errors import ChannelClosedError, FileDescriptorLimitError, SegmentLostError
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle.memory_pool import MemoryPool
from nbparallel.sharing.lifecycle.segment import Block, Phase, Segment, SegmentStatistics, lost
from nbparallel.sharing.memory.mapping import Access, Mapping, Root
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.strategies.strategy import Strategy
from nbparallel.wire.segments import (
    AllowWrite,
    Forget,
    FramePayload,
    Freed,
    Intend,
    Register,
    Removed,
    segment_id,
)

# Registration: which sessions know which segments and memories of this process.

ASK_SECONDS = 1.0
"""Between two requests for room; arbitrary."""


class Sessions:
    """The brokers of the sessions that a process is in.

    Parameters
    ----------
    on_gone : callable
        Called with a broker that cannot be reached any more; takes it off the list.
    """

    def __init__(self, on_gone: Callable[[SegmentBroker], None]) -> None:
        self.brokers: list[SegmentBroker] = []
        self.aside: list[SegmentBroker] = []
        """Those of them that are used only where a caller says so."""
        self._on_gone = on_gone
        self._asked = -ASK_SECONDS

    @property
    def usual(self) -> list[SegmentBroker]:
        """Those that are used where a caller does not say which."""
        return [broker for broker in self.brokers if broker not in self.aside] if self.aside else self.brokers

    def choose(self, broker: SegmentBroker | None) -> SegmentBroker | None:
        """Return `broker`, or the only one there is; None if there is none."""
        if broker is not None:
            return broker
        brokers = self.usual
        if len(brokers) > 1:
            raise ValueError(f"this process is in {len(brokers)} sessions: name one with broker=")
        return brokers[0] if brokers else None

    def intend(self, path: str) -> None:
        """Announce a name to all before it exists.

        Raises
        ------
        ChannelClosedError
            This is a rank, and its session has ended: the rank exits in a moment, and the name would stay.
        """
        for broker in list(self.brokers):
            try:
                broker.send(Intend(path))
            except ChannelClosedError:
                self._on_gone(broker)
                if broker.client:
                    raise

    def removed(self, path: str) -> None:
        """Withdraw a name in every session."""
        for broker in list(self.brokers):
            self.notify(broker, Removed(path))

    def make_room(self) -> bool:
        """Have all other processes return what they keep for reuse; not again within a second: return if so.

        A process that computes reads nothing for long, and must not find a thousand such messages.
        """
        now = time.monotonic()
        if not self.brokers or now < self._asked + ASK_SECONDS:
            return False
        self._asked = now
        for broker in list(self.brokers):
            self.notify(broker, Freed(0))
        return True

    def notify(self, broker: SegmentBroker, message: FramePayload) -> None:
        """Send a message to one session; nothing if that has ended."""
        try:
            broker.send(message)
        except ChannelClosedError:
            self._on_gone(broker)


# Which regions of a process take arrays, and how large the next one is.

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
            if segment.region is not None and (root := segment.region.allocate(nbytes)) is not None:
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


MOST_POSTED = 16
"""Blocks kept that messages may hold and no array here uses: each costs a descriptor."""


class ExportedSegments:
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
        self._serial = itertools.count(1)
        self._memories: dict[int, list[SegmentBroker]] = {}
        """Memory id -> sessions in which a process may keep it mapped."""
        pool.close_block = self.free_block

    def _new_id(self) -> int:
        """Return an id that no segment of this process had, greater than all."""
        return segment_id(self.client, next(self._serial))

    @property
    def released(self) -> list[Block]:
        """Memory that only other processes use, as far as is known here."""
        return [s.block for s in self.by_id.values() if s.phase is Phase.RELEASED and s.block is not None]

    def add(self, block: Block, *, writable: bool, poolable: bool) -> Segment:
        """Give a block of memory a new identity."""
        identifier = self._new_id()
        if block.for_all and not writable:
            # A process that keeps it mapped for writing must not reach what it may only read.
            self._unmap_elsewhere(block)
        segment = Segment(identifier, block.nbytes, block.source.strategy, writable)
        segment.receive(block, poolable=poolable)
        self.by_id[identifier] = segment
        return segment

    def register(self, segment: Segment, broker: SegmentBroker | None) -> int:
        """Return the id under which a session knows a segment; register it there if it is new."""
        if broker is None or segment.broker is broker:
            return segment.id
        session_id = segment.registered.get(broker)
        if session_id is not None and broker not in segment.not_kept:
            return session_id
        if segment.block is not None:
            self._register(segment, broker, segment.id, segment.block.source.fd, segment.block.source.path)
            return segment.id
        # From one session into another: the same memory under an id of ours.
        session_id = session_id or self._new_id()
        source, source_id = segment.reach()
        fd = source.fetch(source_id, writable=segment.writable)
        try:
            self._register(segment, broker, session_id, fd)
        finally:
            os.close(fd)
        return session_id

    def _register(
        self, segment: Segment, broker: SegmentBroker, session_id: int, fd: int, path: str = ""
    ) -> None:
        memory = segment.memory if segment.own else 0
        if memory and broker not in (known := self._memories.setdefault(memory, [])):
            known.append(broker)
        try:
            broker.send(Register(session_id, segment.nbytes, segment.writable, memory, path), fd)
            self.by_id[session_id] = segment
            segment.registered[broker] = session_id
            segment.not_kept.discard(broker)
        except BaseException:
            # Whether an interrupted message went out is not known: take it back, which harms in no case.
            segment.registered.pop(broker, None)
            self._sessions.notify(broker, Forget(session_id))
            raise

    def allow_write(self, segment: Segment) -> None:
        """Let every process write to an own segment from now on."""
        if segment.writable:
            return
        if segment.block is not None:
            segment.block.for_all = True
        for broker, session_id in list(segment.registered.items()):
            self._sessions.notify(broker, AllowWrite(session_id))
        segment.writable = True

    def _unmap_elsewhere(self, block: Block) -> None:
        """Have other processes unmap the memory of a block, which is not used again (idempotent)."""
        memory, block.memory, block.for_all = block.memory, 0, False
        self._end_memory(memory)

    def _end_memory(self, memory: int) -> None:
        for broker in list(self._memories.get(memory, ())):
            self._sessions.notify(broker, Freed(memory))
        self._memories.pop(memory, None)

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
        self._unmap_elsewhere(block)

    def disconnect(self, broker: SegmentBroker) -> None:
        """Retire what only a session that has ended used."""
        for known in list(self._memories.values()):
            if broker in known:
                known.remove(broker)
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

    def change_client_id(self, client: int) -> None:
        """Give every segment an id of another client number, in no session.

        With a number other than 0 other processes may write to them from then on, as to all that a rank
        makes: only a notebook's arrays are protected from its ranks.
        """
        self.client = client
        for block in self.pool.blocks:
            self._unmap_elsewhere(block)
        segments = list(self.by_id.values())
        self.by_id.clear()
        for segment in segments:
            segment.id = self._new_id()
            self.by_id[segment.id] = segment
            own = segment.block
            if client and not segment.writable and own is not None and own.mapping.access is Access.WRITE:
                was_open = segment.region is not None and self.regions.close(segment)
                segment.writable = True
                if was_open:
                    self.regions.open(segment)
            if own is not None:
                self._unmap_elsewhere(own)
                segment.receive(own, poolable=segment.poolable)

    def repair(self) -> None:
        """Complete what an interrupted `free_block` left undone."""
        used = [segment.block for segment in self.by_id.values() if segment.block is not None]
        living = {block.memory for block in (*used, *self.pool.blocks)}
        for memory in [memory for memory in self._memories if memory not in living]:
            self._end_memory(memory)

    def statistics(self) -> list[SegmentStatistics]:
        """Return a record of each segment that this process made and has not retired."""
        return [segment.statistics() for segment in self.by_id.values() if segment.own]
