"""Making room: what a process can give back before an array is refused."""

from __future__ import annotations

import time

from nbparallel.sharing.holdings import Holdings

PATIENCE_SECONDS = 0.2
"""Within this comes back what nobody else holds, if the supervisor is not very busy."""


def make_room(holdings: Holdings) -> bool:
    """Give back what is pooled or comes back in this moment; return whether there was anything."""
    given = holdings.kept.trim(0.0) + holdings.pool.trim(0.0) > 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := holdings.released:
        holdings.collect()
        holdings.pool.trim(0.0)
        if holdings.released < left:
            given = True
        elif time.monotonic() >= deadline:
            break
        else:
            time.sleep(0.001)
    return given
