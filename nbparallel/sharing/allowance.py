"""Allowance: how many bytes a process may keep for its next arrays.

It is a share of what is *left*, by the tightest limit of machine and container: what one process keeps is no
longer left for the next one's share, so that all of them together can never take everything, however many
there are.
"""

from __future__ import annotations

import os
import time

from nbparallel.sharing.memory.memory_limits import ReadText, limits, read_text

SHARE = 8
"""A process keeps at most 1/8 of what is left."""
MOST_NBYTES = 1 << 30
"""Kept at most, in bytes, on a machine that has plenty."""
LEAST_NBYTES = 4 << 20
"""Kept without a look at what is left, which takes 0.1 ms."""
FRESH_SECONDS = 1.0
"""How long a look is relied on."""


class Allowance:
    """What may be kept.

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
    # Without /proc nobody says what is left: half of the machine is a guess.
    return min(free) if free else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
