"""Memory whose accesses are recorded in this process, and which bytes of it were touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_log import POSSIBLE, READ, WRITE, Box, Elements, MemoryAccess
from nbparallel.distributed.races.access_recorder import AccessRecorder, UserLines
from nbparallel.distributed.races.checked_cell import doors
from nbparallel.distributed.races.traced_array import TracedArray, plain, recording, trace
from nbparallel.distributed.runtime.call_site import label_function

byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # numpy 1.26 has it elsewhere

SEGMENT = 7
OFFSET = 1000
"""Of the memory in the segment."""
Bytes = set[int]


class Memory:
    """Arrays in one segment."""

    def __init__(self, *arrays: np.ndarray[Any, Any], filename: str = __file__) -> None:
        self.arrays = arrays
        self.lines = UserLines(label_function(filename))
        self.recorder = AccessRecorder(self._locate, self.lines)

    def _locate(self, array: np.ndarray[Any, Any]) -> tuple[int, int] | None:
        address = plain(array).__array_interface__["data"][0]
        for number, one in enumerate(self.arrays):
            low, high = byte_bounds(one)
            if low <= address < high:
                return SEGMENT + number, OFFSET + address - low
        return None

    @contextmanager
    def checked(self, namespace: dict[str, Any] | None = None) -> Iterator[None]:
        """Record for the time of the block."""
        with recording(self.recorder), doors(self.recorder, namespace or {}):
            yield

    def touched(self, number: int = 0) -> dict[int, Bytes]:
        """Return the bytes of an array that were accessed, by kind, counted from its first byte."""
        found: dict[int, Bytes] = {}
        for access in self.recorder.take()[0]:
            if access.segment == SEGMENT + number:
                found.setdefault(access.kind, set()).update(bytes_of(access))
        return found


def bytes_of(access: MemoryAccess) -> Bytes:
    """Return the bytes of one access, one by one."""
    region = access.region
    if isinstance(region, Elements):
        offsets = np.frombuffer(region.offsets, np.int64)
        assert (np.diff(offsets) > 0).all()
        starts = offsets.tolist()
    else:
        assert isinstance(region, Box)
        assert 0 not in region.shape
        starts = [
            region.offset + sum(i * s for i, s in zip(index, region.strides, strict=True))
            for index in np.ndindex(*region.shape)
        ]
    return {start + byte - OFFSET for start in starts for byte in range(region.itemsize)}


def touched_by(x: np.ndarray[Any, Any], code: Callable[[TracedArray], object]) -> dict[int, Bytes]:
    """Return the bytes of an array that code touches when it gets it traced."""
    memory = Memory(x)
    with memory.checked():
        code(trace(x))
    return memory.touched()


def bytes_where(x: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> Bytes:
    """Return the bytes of the elements that a mask of a contiguous array chooses."""
    assert x.flags.c_contiguous
    assert mask.shape == x.shape
    starts = np.flatnonzero(mask) * x.itemsize
    return {int(start) + byte for start in starts for byte in range(x.itemsize)}


__all__ = ["POSSIBLE", "READ", "WRITE", "Memory", "bytes_where", "touched_by"]
