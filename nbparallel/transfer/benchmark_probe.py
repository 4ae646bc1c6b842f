"""The rank's half of measuring sharing strategies: take arrays, read them, release them."""

from __future__ import annotations

import os
import time

import numpy as np

from nbparallel.sharing import current_store
from nbparallel.transfer import pickling


def receive(data: bytes) -> tuple[float, float, int] | None:
    """Take the arrays in a message, read them and release them; None on other ranks than 0.

    Returns
    -------
    attach, read : float
        Seconds from the message to the arrays, and for the first reading of every byte.
    total : int
        Sum of the bytes in words of eight: proves that they were read, and are the right ones.
    """
    if os.environ.get("RANK") != "0":
        return None
    start = time.perf_counter()
    arrays = pickling.loads(data, current_store())
    attached = time.perf_counter()
    total = sum(int(array.view(np.uint64).sum()) for array in arrays) % (1 << 64)
    read = time.perf_counter()
    del arrays
    current_store().drain()
    return attached - start, read - attached, total
