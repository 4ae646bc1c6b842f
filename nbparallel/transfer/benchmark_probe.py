"""The rank's half of measuring sharing strategies: take arrays, read them, release them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from nbparallel.sharing import current_store
from nbparallel.transfer import pickling
from nbparallel.wire.segments import NAME_PREFIX


@dataclass(frozen=True, slots=True)
class Received:
    """What one rank saw of some arrays, in seconds and bytes."""

    attach: float
    """From the message to the arrays."""
    read: float
    """Reading every byte once, for the first time."""
    total: int
    """Sum over the bytes in words of eight: proves that they were read, and are the right ones."""
    descriptors: int
    """Open files that the arrays cost this process."""


def receive(data: bytes, rank: int = 0) -> Received | None:
    """Take the arrays in a message, read them and release them; None on other ranks than `rank`.

    Parameters
    ----------
    data : bytes
        `pickling.dumps` of a list of arrays whose bytes are a multiple of eight.
    """
    if os.environ.get("RANK") != str(rank):
        return None
    before = descriptors()
    start = time.perf_counter()
    arrays = pickling.loads(data, current_store())
    attached = time.perf_counter()
    total = sum(int(array.view(np.uint64).sum()) for array in arrays)
    read = time.perf_counter()
    cost = descriptors() - before
    del arrays
    current_store().drain()
    return Received(attached - start, read - attached, total, cost)


def descriptors(pid: int | str = "self") -> int:
    """Return how many files a process has open; 0 if the system does not say."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def names() -> int:
    """Return how many names in the file system the mappings of this process have."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file}
    except OSError:
        return 0
    return sum(os.path.basename(p).startswith(NAME_PREFIX) and not p.endswith("(deleted)") for p in paths)
