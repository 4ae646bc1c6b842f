"""Pool: freed segments of this process, kept because their pages have been touched already.

The first touch of fresh shared pages costs about ten times the copy into them (64 MB: 40 ms, then 4 ms).
What nobody needs goes back after a while, also when nothing happens: a rank's loop and the session's thread
see to it.  A process without a session has neither, so it keeps nothing (`Holdings`).
"""

from __future__ import annotations

import mmap
import time
from bisect import bisect_left, insort
from collections.abc import Callable

from nbparallel.sharing.allowance import Allowance
from nbparallel.sharing.descriptors import spare
from nbparallel.sharing.segment import Block, SegmentStatistics

SLACK = 8
"""A segment serves a request if no more than 1/8 of it is wasted."""
MAX_BLOCKS = 64
"""Kept at most: each costs one or two descriptors.  Less where few are allowed."""
KEEP_SECONDS = 30.0
"""Kept at most, if nobody needs it."""


class Pool:
    """Freed blocks by size; not thread-safe, its store locks."""

    def __init__(self, max_nbytes: int | None = None) -> None:
        self.allowance = Allowance(max_nbytes)
        self.lasting = max_nbytes is not None
        """Whether memory is kept without a session as well."""
        self._blocks: list[tuple[int, int, Block]] = []
        self.on_first: list[Callable[[], None]] = []
        """Called when the pool is about to keep something again: somebody has to `trim` it in time."""
        self.close_block: Callable[[Block], None] = Block.close
        """Called with what is not kept any longer; gives it back to the system."""

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
        at = bisect_left(self._blocks, (nbytes,))
        while at < len(self._blocks) and self._blocks[at][0] <= _most(nbytes):
            if self._blocks[at][2].source.strategy == strategy:
                return self._remove(at)
            at += 1
        return None

    @staticmethod
    def fits(block: Block, nbytes: int, strategy: str) -> bool:
        """Return whether `take` would return a block if it lay here."""
        return nbytes <= block.nbytes <= _most(nbytes) and block.source.strategy == strategy

    def put(self, block: Block) -> None:
        """Keep a block, closing the oldest ones if it gets too much."""
        if not self.allowance.allows(block.nbytes, block.nbytes):
            self.close_block(block)  # rather than everything that is older
            return
        block.freed = time.monotonic()
        if not self._blocks:
            for hear in list(self.on_first):
                hear()
        insort(self._blocks, (block.nbytes, id(block), block))
        while not self._allowed() or len(self._blocks) > min(MAX_BLOCKS, spare()):
            oldest = min(range(len(self._blocks)), key=lambda at: self._blocks[at][2].freed)
            self.close_block(self._remove(oldest))

    def trim(self, keep_seconds: float | None = None) -> int:
        """Close every block that has not been needed for so long (`KEEP_SECONDS`); return the bytes."""
        if not self._blocks:
            return 0
        limit = time.monotonic() - (KEEP_SECONDS if keep_seconds is None else keep_seconds)
        old = [at for at, (_, _, block) in enumerate(self._blocks) if block.freed <= limit]
        before = self.nbytes
        for at in reversed(old):
            self.close_block(self._remove(at))
        return before - self.nbytes

    def seconds_left(self) -> float | None:
        """Return when there is something to `trim`; None if nothing is kept."""
        if not self._blocks:
            return None
        oldest = min(block.freed for _, _, block in self._blocks)
        return max(0.0, oldest + KEEP_SECONDS - time.monotonic())

    def statistics(self) -> tuple[SegmentStatistics, ...]:
        """Return a record of every block, the smallest first."""
        return tuple(
            SegmentStatistics(0, nbytes, block.source.strategy, True, "pooled", True, 0)
            for nbytes, _, block in self._blocks
        )

    def _allowed(self) -> bool:
        nbytes = self.nbytes
        return self.allowance.allows(nbytes, nbytes)

    def _remove(self, at: int) -> Block:
        return self._blocks.pop(at)[2]


def _most(nbytes: int) -> int:
    return nbytes + nbytes // SLACK + mmap.PAGESIZE
