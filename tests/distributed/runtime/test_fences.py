"""F37: buffers that end where forbidden pages begin: one byte read or written too far would kill the rank."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from tests.distributed.conformance.cases import ALL, Setting, complete, dtypes_of
from tests.distributed.conformance.guarded import Guards

PAGE, PROT_NONE = mmap.PAGESIZE, 0
SIZES = (1, 7, 511, 3000, 40_000)


class Fences(Guards):
    """Makes buffers that lie against a page that cannot be read, before them or behind them."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._behind = True

    def buffer(self, shape: Any, dtype: Any, layout: str = "private") -> np.ndarray[Any, Any]:
        """Return an array with a forbidden page at one end, in turn."""
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        pages = -(-max(nbytes, 1) // PAGE)
        memory = mmap.mmap(-1, (pages + 2) * PAGE)
        octets = np.frombuffer(memory, np.uint8)
        start = int(octets.__array_interface__["data"][0])
        for page in (0, pages + 1):
            if self._libc.mprotect(ctypes.c_void_p(start + page * PAGE), PAGE, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        at = (pages + 1) * PAGE - nbytes if self._behind else PAGE
        self._behind = not self._behind
        inside = octets[PAGE : (pages + 1) * PAGE]
        inside[...] = 0xA5
        self._surroundings.append((inside, [inside[: at - PAGE], inside[at - PAGE + nbytes :]]))
        return np.ndarray(shape, dtype, octets, at)


@pytest.mark.slow
@pytest.mark.fault("F37")
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_operation_leaves_its_buffers(ranks: Any, n: int) -> None:
    """Every collective and message, on inputs and outputs of odd sizes, at both ends of a page."""

    def work(c: Communicator) -> int:
        count = 0
        for name, case in ALL.items():
            for size, wanted in zip(SIZES, ("i1", "f8", "f2", "c16", "i1"), strict=True):
                dtype = wanted if wanted in dtypes_of(name) else "f8"
                setting = Setting(c, None, list(range(n)), count % n, dtype, size)
                setting.guards = Fences(c)
                running = case(setting)
                complete(running, next(running), setting)
                count += 1
        return count

    assert ranks(n, work, seconds=500) == [len(ALL) * len(SIZES)] * n
