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
import mmap
import os
import time
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from nbparallel.errors import ChannelClosedError, FileDescriptorLimitError, SegmentLostError
from nbparallel.sharing.lifecycle.segment import (
    Block,
    Region,
    Segment,
    SegmentBroker,
    SegmentStatistics,
)
from nbparallel.sharing.memory.mapping import Access
from nbparallel.sharing.memory.memory_limits import limits, spare
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
from nbparallel.wire.system import ReadText, read_text

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
        self.posted: set[int] = set()
        """Our ids of segments that messages in flight hold, or held."""
        self.gave_up = False
        """Whether any of them was left to the supervisor."""
        self.unused: dict[int, Segment] = {}
        """Those of them that no array here uses, the oldest first; some may be used again, or retired."""
        self.open_regions: dict[tuple[str, bool], list[Region]] = {}
        """By strategy and right: those that take arrays."""
        self.by_id: dict[int, Segment] = {}
        """By our ids: segments made here, and fetched ones that another session knows by an id of ours."""
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
        return [s.block for s in self.by_id.values() if s.released and s.block is not None]

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

    def close_region(self, segment: Segment) -> None:
        """Put no more arrays into `segment` (idempotent)."""
        taking = self.open_regions.get((segment.strategy, segment.writable), [])
        if segment.region in taking:
            taking.remove(segment.region)

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

    def retire(self, segment: Segment) -> None:
        """Pool or free the memory of a segment that no session and no array needs (idempotent)."""
        block = segment.block
        if block is None or segment.used or segment.registered or self.by_id.pop(segment.id, None) is None:
            return
        if segment.poolable and (self._sessions.brokers or self.pool.lasting):
            self.pool.put(block)
            return
        path = block.source.path
        self.free_block(block)
        if path:
            self._sessions.removed(path)

    def mark_posted(self, segments: Iterable[int]) -> None:
        """Record that messages hold segments; leave those to the supervisor that no array uses and are many.

        It is asked for a descriptor of each first: what it could not keep, this process must.
        """
        self.posted.update(self.by_id.keys() & segments)
        for identifier, segment in list(self.unused.items()):
            if identifier not in self.by_id:
                self.posted.discard(identifier)
            if identifier not in self.by_id or not segment.released:
                self.unused.pop(identifier, None)
        for segment in list(self.unused.values())[:-MOST_POSTED]:
            self.unused.pop(segment.id, None)
            self._give_up(segment)

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
                self.close_region(segment)
                segment.writable = True
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


# Memory pool: freed segments of this process, kept because their pages have been touched already.
#
# The first touch of fresh shared pages costs about ten times the copy into them (64 MB: 40 ms, then 4 ms).
# What is not reused is freed after a while, also when nothing happens: a rank's loop and the session's thread
# see to it.  A process without a session has neither, so it keeps nothing (`ExportedSegments.retire`).

SHARE = 8
"""A process keeps at most 1/8 of what is left."""
MOST_NBYTES = 1 << 30
"""Kept at most, in bytes, on a machine that has plenty."""
LEAST_NBYTES = 4 << 20
"""Kept without reading what is left, which takes 0.1 ms."""
FRESH_SECONDS = 1.0
"""How long a reading is relied on."""


class PoolBudget:
    """How much freed memory may be kept.

    Parameters
    ----------
    fixed : int, optional
        Always so many bytes, whatever is left.
    read : callable, optional
        Returns a small file's text.
    """

    def __init__(self, fixed: int | None = None, read: ReadText = read_text) -> None:
        self.fixed = fixed
        self._read = read
        self._until = 0.0
        self._left = 0

    def allows(self, nbytes: int, own: int = 0) -> bool:
        """Return whether `nbytes` may be kept; `own` of them would be left if they were not."""
        if self.fixed is not None:
            return nbytes <= self.fixed
        if nbytes <= LEAST_NBYTES:
            return True
        if nbytes > MOST_NBYTES:
            return False
        if time.monotonic() >= self._until:
            # Without /proc what is left is unknown: half of the machine is a guess.
            unknown = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            self._left = min((limit.free for limit in limits(self._read)), default=unknown)
            self._until = time.monotonic() + FRESH_SECONDS
        return nbytes <= (self._left + own) // SHARE


SLACK = 8
"""A segment serves a request if no more than 1/8 of it is wasted."""
MAX_BLOCKS = 64
"""Kept at most: each costs a descriptor.  Less where few are allowed."""
KEEP_SECONDS = 30.0
"""Kept at most, if it is not reused."""
REFUSES_SECONDS = 0.2
"""An array that died just now comes back when the supervisor has read that no process holds it."""


class Kept(Protocol):
    """Something that is kept."""

    since: float

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


K = TypeVar("K")
V = TypeVar("V", bound=Kept)


class KeptMemory(Generic[K, V]):
    """Memory that no array uses, kept for a while, the oldest first; not thread-safe, its store locks.

    A signal handler, or a user's ``__del__``, may take and put anywhere: so loops are over copies, and one
    certain entry is taken out.
    """

    def __init__(self, budget: PoolBudget, most: int, on_first: list[Callable[[], None]]) -> None:
        self.budget: PoolBudget = budget
        self._most, self._kept = most, dict[K, V]()
        self.on_first: list[Callable[[], None]] = on_first
        """Called when something is about to be kept, and nothing is: it has to be trimmed in time."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return sum(kept.nbytes for kept in list(self._kept.values()))

    def _keep(self, key: K, what: V) -> None:
        """Keep something, and give up the oldest if it gets too much."""
        what.since = time.monotonic()
        if not self._kept:
            for notify in list(self.on_first):
                notify()
        self._kept[key] = what
        for oldest in list(self._kept):
            if self._allows(self.nbytes) and len(self._kept) <= min(self._most, spare()):
                break
            self._drop(oldest)

    def _allows(self, nbytes: int) -> bool:
        return self.budget.allows(nbytes)

    def trim(self, keep_seconds: float | None = None) -> int:
        """Give up what has not been needed for so long (`KEEP_SECONDS`); return the bytes."""
        if not self._kept:
            return 0
        limit = time.monotonic() - (KEEP_SECONDS if keep_seconds is None else keep_seconds)
        return sum(self._drop(key) for key, kept in list(self._kept.items()) if kept.since <= limit)

    def _drop(self, key: K) -> int:
        """Give up one; return its bytes."""
        if (kept := self._kept.pop(key, None)) is None:
            return 0
        self._close(kept)
        return kept.nbytes

    def _close(self, kept: V) -> None:
        raise NotImplementedError

    def seconds_left(self) -> float | None:
        """Return when there is something to `trim`; None if nothing is kept."""
        since = [kept.since for kept in list(self._kept.values())]
        return max(0.0, min(since) + KEEP_SECONDS - time.monotonic()) if since else None


class MemoryPool(KeptMemory[int, Block]):
    """Freed blocks, by their identity."""

    def __init__(self, max_nbytes: int | None = None) -> None:
        super().__init__(PoolBudget(max_nbytes), MAX_BLOCKS, [])
        self.lasting: bool = max_nbytes is not None
        """Whether memory is kept without a session as well."""
        self._refuses_until = 0.0
        self.close_block: Callable[[Block], None] = Block.close
        """Called with a block that is not kept any longer, to free it."""

    @property
    def blocks(self) -> list[Block]:
        """What is kept, the oldest first."""
        return list(self._kept.values())

    def take(self, nbytes: int, strategy: str) -> Block | None:
        """Return the smallest block that holds `nbytes` without much waste."""
        fitting = [block for block in self.blocks if self.fits(block, nbytes, strategy)]
        for block in sorted(fitting, key=lambda block: block.nbytes):
            if self._kept.pop(id(block), None) is block:
                return block
        return None

    @staticmethod
    def fits(block: Block, nbytes: int, strategy: str) -> bool:
        """Return whether `take` would return a block if it were here."""
        most = nbytes + nbytes // SLACK + mmap.PAGESIZE
        return nbytes <= block.nbytes <= most and block.source.strategy == strategy

    def put(self, block: Block) -> None:
        """Keep a block, closing the oldest ones if it gets too much."""
        if time.monotonic() < self._refuses_until or not self._allows(block.nbytes):
            self.close_block(block)  # rather than everything that is older
        else:
            self._keep(id(block), block)

    def _allows(self, nbytes: int) -> bool:
        return self.budget.allows(nbytes, nbytes)

    def _close(self, kept: Block) -> None:
        self.close_block(kept)

    def refuse(self) -> None:
        """Free all blocks, and keep none for a moment: another process has no room for an array."""
        self._refuses_until = time.monotonic() + REFUSES_SECONDS
        self.trim(0.0)

    def statistics(self) -> tuple[SegmentStatistics, ...]:
        """Return a record of every block."""
        return tuple(
            SegmentStatistics(0, block.nbytes, block.source.strategy, True, "pooled", True, 0)
            for block in self.blocks
        )
