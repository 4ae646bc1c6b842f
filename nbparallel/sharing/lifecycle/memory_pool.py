"""Memory pool: freed segments of this process, kept because their pages have been touched already.

The first touch of fresh shared pages costs about ten times the copy into them (64 MB: 40 ms, then 4 ms).
What is not reused is freed after a while, also when nothing happens: a rank's loop and the session's thread
see to it.  A process without a session has neither, so it keeps nothing (`ExportedSegments.retire`).
"""

from __future__ import annotations

import mmap
import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable

from nbparallel.sharing.lifecycle.segment import Block, SegmentStatistics
from nbparallel.sharing.memory.memory_limits import limits, spare
from nbparallel.wire.system import ReadText, read_text

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
            self._left = _left(self._read)
            self._until = time.monotonic() + FRESH_SECONDS
        return nbytes <= (self._left + own) // SHARE


def _left(read: ReadText) -> int:
    free = [limit.free for limit in limits(read)]
    # Without /proc what is left is unknown: half of the machine is a guess.
    return min(free) if free else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


SLACK = 8
"""A segment serves a request if no more than 1/8 of it is wasted."""
MAX_BLOCKS = 64
"""Kept at most: each costs a descriptor.  Less where few are allowed."""
KEEP_SECONDS = 30.0
"""Kept at most, if it is not reused."""
REFUSES_SECONDS = 0.2
"""An array that died just now comes back when the supervisor has read that no process holds it."""


class MemoryPool:
    """Freed blocks by size; not thread-safe, its store locks.

    A signal handler, or a user's ``__del__``, may take and put blocks anywhere: so what is taken out is a
    certain block, never the one at some index.
    """

    budget: PoolBudget
    lasting: bool

    def __init__(self, max_nbytes: int | None = None) -> None:
        self.budget = PoolBudget(max_nbytes)
        self.lasting = max_nbytes is not None
        """Whether memory is kept without a session as well."""
        self._blocks: list[tuple[int, int, Block]] = []
        self._refuses_until = 0.0
        self.on_first: list[Callable[[], None]] = []
        """Called when the empty pool is about to keep a block: it has to be trimmed in time."""
        self.close_block: Callable[[Block], None] = Block.close
        """Called with a block that is not kept any longer, to free it."""

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> list[Block]:
        """What is kept, the smallest first."""
        return [block for _, _, block in self._blocks]

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return sum(nbytes for nbytes, _, _ in self._blocks)

    def take(self, nbytes: int, strategy: str) -> Block | None:
        """Return the smallest block that holds `nbytes` without much waste."""
        for entry in self._blocks[bisect_left(self._blocks, (nbytes,)) :]:
            if entry[0] > _most(nbytes):
                break
            if self.fits(entry[2], nbytes, strategy) and self._remove(entry):
                return entry[2]
        return None

    @staticmethod
    def fits(block: Block, nbytes: int, strategy: str) -> bool:
        """Return whether `take` would return a block if it were here."""
        return nbytes <= block.nbytes <= _most(nbytes) and block.source.strategy == strategy

    def put(self, block: Block) -> None:
        """Keep a block, closing the oldest ones if it gets too much."""
        if time.monotonic() < self._refuses_until or not self.budget.allows(block.nbytes, block.nbytes):
            self.close_block(block)  # rather than everything that is older
            return
        block.freed = time.monotonic()
        if not self._blocks:
            for notify in list(self.on_first):
                notify()
        insort(self._blocks, (block.nbytes, id(block), block))
        while not self._allowed() or len(self._blocks) > min(MAX_BLOCKS, spare()):
            oldest = min(list(self._blocks), key=lambda entry: entry[2].freed, default=None)
            if oldest is None:
                break
            if self._remove(oldest):
                self.close_block(oldest[2])

    def refuse(self) -> None:
        """Free all blocks, and keep none for a moment: another process has no room for an array."""
        self._refuses_until = time.monotonic() + REFUSES_SECONDS
        self.trim(0.0)

    def trim(self, keep_seconds: float | None = None) -> int:
        """Close every block that has not been needed for so long (`KEEP_SECONDS`); return the bytes."""
        if not self._blocks:
            return 0
        limit = time.monotonic() - (KEEP_SECONDS if keep_seconds is None else keep_seconds)
        closed = 0
        for entry in reversed([entry for entry in self._blocks if entry[2].freed <= limit]):
            if self._remove(entry):
                self.close_block(entry[2])
                closed += entry[0]
        return closed

    def seconds_left(self) -> float | None:
        """Return when there is something to `trim`; None if nothing is kept."""
        freed = [entry[2].freed for entry in self._blocks]
        return max(0.0, min(freed) + KEEP_SECONDS - time.monotonic()) if freed else None

    def statistics(self) -> tuple[SegmentStatistics, ...]:
        """Return a record of every block, the smallest first."""
        return tuple(
            SegmentStatistics(0, nbytes, block.source.strategy, True, "pooled", True, 0)
            for nbytes, _, block in self._blocks
        )

    def _allowed(self) -> bool:
        nbytes = self.nbytes
        return self.budget.allows(nbytes, nbytes)

    def _remove(self, entry: tuple[int, int, Block]) -> bool:
        try:
            self._blocks.remove(entry)  # in one step
        except ValueError:
            return False
        return True


def _most(nbytes: int) -> int:
    return nbytes + nbytes // SLACK + mmap.PAGESIZE
