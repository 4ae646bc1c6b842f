"""Copying: an array's bytes into shared memory, with their layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.sharing.memory.array_layout import extent

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a copy of an array lies in its segment."""

    nbytes: int
    """Bytes that it takes."""
    offset: int
    """Where its element with all indices 0 lies."""
    strides: tuple[int, ...]
    """Its strides in bytes."""
    verbatim: npt.NDArray[np.uint8] | None
    """The bytes to copy as they are, or None if the elements have to be copied one by one."""


def plan(array: AnyArray) -> Plan:
    """Decide how to lay out a copy of `array`.

    If the bytes from its first to its last are no more than its elements need (it is dense in any order,
    reversed, broadcast, or windows over one row), they are copied as they are and all strides stay.
    Otherwise the gaps are dropped; the order of the axes stays.
    """
    low, high = extent(array.shape, array.strides, array.itemsize)
    if high - low <= array.nbytes:
        return Plan(high - low, -low, array.strides, np.asarray(_Bytes(array, low, high)))
    return Plan(array.nbytes, 0, _compact_strides(array), None)


class _Bytes:
    """The bytes under an array, whatever its dtype and strides (numpy's array interface)."""

    def __init__(self, array: AnyArray, low: int, high: int) -> None:
        self.keep = array
        self.__array_interface__ = {
            "data": (array.ctypes.data + low, True),
            "shape": (high - low,),
            "typestr": "|u1",
            "version": 3,
        }


def _compact_strides(array: AnyArray) -> tuple[int, ...]:
    """Return the strides of a dense array whose axes are ordered in memory as `array`'s are."""
    axes = sorted(range(array.ndim), key=lambda axis: (abs(array.strides[axis]), -axis))
    strides = [0] * array.ndim
    step = array.itemsize
    for axis in axes:
        strides[axis] = step
        step *= array.shape[axis]
    return tuple(strides)
