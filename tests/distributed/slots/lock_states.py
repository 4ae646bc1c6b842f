"""What tests of locks look at: numbers that ranks share, and which rank sleeps."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from nbparallel.distributed import Communicator
from nbparallel.wire.control import Operation, State
from tests.harness.ranks import context_of


def numbers(count: int = 64) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return numbers that ranks forked later share, writable."""
    return np.frombuffer(mmap.mmap(-1, count * 8), np.int64)


def waits(c: Communicator, rank: int, operation: Operation = Operation.lock) -> bool:
    """Whether a rank sleeps in an operation."""
    record = context_of(c).view.read_slot(rank)
    return record.state is State.WAITING and record.operation is operation
