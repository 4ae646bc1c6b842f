"""Making room: what a process can give back before an array is refused, and what it may get back."""

from __future__ import annotations

import time

from nbparallel.sharing.lifecycle.segment import Block
from nbparallel.sharing.lifecycle.segment_table import Holdings

PATIENCE_SECONDS = 0.2
"""Within this comes back what nobody else holds, if the supervisor is not very busy."""
PAUSE_SECONDS = 0.0001
"""Between two looks."""
WORTH_SECONDS = 5e-12
"""To wait for each byte that may come back: 1/50 of what it takes to make and touch it."""
WORTH_NBYTES = 16 << 20
"""Smaller memory is not waited for."""


def await_return(holdings: Holdings, nbytes: int, strategy: str) -> Block | None:
    """Return pooled memory, also if it comes back in this moment; None if there is none.

    Whoever deletes a large array and makes the next is often quicker than the ranks' word that they do not
    use it any more.
    """
    limit = time.monotonic() + nbytes * WORTH_SECONDS
    while True:
        holdings.collect()
        block = holdings.pool.take(nbytes, strategy)
        if block is not None or nbytes < WORTH_NBYTES or time.monotonic() >= limit:
            return block
        if not holdings.pool.allowance.allows(nbytes, nbytes):
            return None  # it will not be kept
        if not any(holdings.pool.fits(away, nbytes, strategy) for away in holdings.released):
            return None
        time.sleep(PAUSE_SECONDS)


def make_room(holdings: Holdings) -> bool:
    """Give back what is pooled or comes back in this moment; return whether there was anything."""
    given = holdings.kept.trim(0.0) + holdings.pool.trim(0.0) > 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := len(holdings.released):
        holdings.collect()
        holdings.pool.trim(0.0)
        if len(holdings.released) < left:
            given = True
        elif time.monotonic() >= deadline:
            break
        else:
            time.sleep(0.001)
    return given
