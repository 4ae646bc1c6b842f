"""Kept: mappings of other processes' memory that no array looks at any more, for the next array there.

Note [kept mappings]
--------------------
Mapping a segment costs a question to the supervisor, a descriptor, and a page fault for every page that is
read.  Its owner will use the same memory again, for its next array of about the size, and the same array is
often sent again.  So a mapping outlives its last array for a while.  The *hold* does not: the segment ends as
if it had been unmapped, and its owner may write something else there.

An array may begin on a kept mapping only if its handle names a use of that memory which has not ended, as far
as is known here: ids of uses ascend, and the supervisor says which have ended (`heed`).  Rights are those of
the mapping, so one for writing never serves an array for reading.

Memory that its owner gives back to the system is unmapped as soon as this process looks (`drop`).
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
from nbparallel.wire.segments import Notice, NoticeKind

MAX_MAPPINGS = 16
"""Kept at most: until Python 3.12 each costs a descriptor.  Less where few are allowed."""


@dataclass(slots=True, eq=False)
class _Kept:
    mapping: Mapping
    strategy: str
    first: int
    """Uses with a smaller id have ended."""
    since: float
    """When its last array died (monotonic clock, seconds)."""


class MappingCache:
    """Mappings by session, memory and right, the oldest first; not thread-safe, its store locks.

    It is looked at in copies: a user's ``__del__``, run by the collector, may take a mapping anywhere.

    Parameters
    ----------
    allowance : Allowance
        How many bytes of address space: its memory is its owner's, but lives on until this process looks.
    on_first : list of callables
        Called when something is about to be kept again: somebody has to `trim` it in time.
    """

    def __init__(self, budget: PoolBudget, on_first: list[Callable[[], None]]) -> None:
        self._budget = budget
        self._on_first = on_first
        self._kept: dict[tuple[SegmentBroker, int, Access], _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return sum(kept.mapping.nbytes for kept in list(self._kept.values()))

    def put(self, broker: SegmentBroker, segment: Segment, mapping: Mapping) -> None:
        """Keep a mapping of a released segment; unmap the oldest ones if it gets too much."""
        if not self._budget.allows(mapping.nbytes):
            mapping.unmap()  # rather than everything that is older
            return
        if not self._kept:
            for hear in list(self._on_first):
                hear()
        key = (broker, segment.memory, mapping.access)
        if key in self._kept and self._kept[key].mapping is not mapping:
            self._unmap(key)
        self._kept[key] = _Kept(mapping, segment.strategy, segment.id, time.monotonic())
        for oldest in list(self._kept):
            if self._budget.allows(self.nbytes) and len(self._kept) <= min(MAX_MAPPINGS, spare()):
                break
            self._unmap(oldest)

    def has(self, broker: SegmentBroker, memory: int, access: Access) -> bool:
        """Return whether a memory is kept mapped with a right."""
        return (broker, memory, access) in self._kept

    def take(self, broker: SegmentBroker, handle: ArrayHandle, access: Access) -> Mapping | None:
        """Return the mapping that a handle's array may lie in, which is the caller's from now on, or None."""
        key = (broker, handle.memory, access)
        kept = self._kept.get(key)
        if kept is None or handle.segment < kept.first or handle.strategy != kept.strategy:
            return None
        if kept.mapping.nbytes != handle.segment_nbytes:
            return None
        return kept.mapping if self._kept.pop(key, None) is kept else None

    def handle_notice(self, broker: SegmentBroker, notice: Notice) -> bool:
        """Act on a notice if it concerns memory that may be kept mapped, and return whether it does."""
        if notice.kind is NoticeKind.UNMAP:
            self.drop(broker, notice.memory)
        elif notice.kind is NoticeKind.ENDED:
            for (whose, which, _), kept in list(self._kept.items()):
                if whose is broker and which == notice.memory:
                    kept.first = max(kept.first, notice.segment + 1)
        else:
            return False
        return True

    def drop(self, broker: SegmentBroker, memory: int | None = None) -> None:
        """Unmap a memory, or all of a session."""
        for key in list(self._kept):
            if key[0] is broker and memory in (None, key[1]):
                self._unmap(key)

    def trim(self, keep_seconds: float | None = None) -> int:
        """Unmap what no array has needed for so long (`pool.KEEP_SECONDS`); return how many mappings."""
        limit = time.monotonic() - (memory_pool.KEEP_SECONDS if keep_seconds is None else keep_seconds)
        old = [key for key, kept in list(self._kept.items()) if kept.since <= limit]
        for key in old:
            self._unmap(key)
        return len(old)

    def seconds_left(self) -> float | None:
        """Return when there is something to `trim`; None if nothing is kept."""
        since = [kept.since for kept in list(self._kept.values())]
        return max(0.0, min(since) + memory_pool.KEEP_SECONDS - time.monotonic()) if since else None

    def _unmap(self, key: tuple[SegmentBroker, int, Access]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.mapping.unmap()
