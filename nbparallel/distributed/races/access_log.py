"""Log of accesses: what one rank of a checked cell did with shared memory, and which events put it in order.

An interval of a rank lies between two of its events: interval k after event k - 1 and before event k.  An
access in interval i of one rank comes before one in interval j of another if the first has published, in
an event i or later, what the second has acquired, itself or through others, in an event before j.
Standard library only: it crosses the border between processes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Key = tuple[Any, ...]
"""Strings, numbers and tuples of them."""
READ, WRITE, POSSIBLE = 1, 2, 4
"""Bits of a kind; POSSIBLE: it went through a function that may touch less, or nothing."""


class Box(NamedTuple):
    """The elements of a strided array, in bytes from the beginning of the segment."""

    offset: int
    """Of the element whose indices are all 0."""
    shape: tuple[int, ...]
    """No length is 0."""
    strides: tuple[int, ...]
    """May be negative."""
    itemsize: int
    """Bytes of one element."""


class Elements(NamedTuple):
    """Single elements of one size."""

    itemsize: int
    """Bytes of one element."""
    offsets: bytes
    """Of each, from the beginning of the segment: int64, ascending, each once."""


class Site(NamedTuple):
    """A place in the user's code."""

    label: str
    """Empty: the cell itself; else ``In[2]`` or ``steps.py``."""
    line: int
    """0: unknown."""
    door: str = ""
    """The function through which it may have been touched: ``torch.from_numpy``; empty: it was."""


class MemoryAccess(NamedTuple):
    """What one line did in one interval to a part of a segment."""

    interval: int
    """Of this rank."""
    segment: int
    """The segment's id in the session."""
    site: Site
    """The line."""
    kind: int
    """READ, WRITE, or both; and POSSIBLE."""
    region: Box | Elements
    """Where."""
    stored: bytes | None = None
    """The number that was written to each element, as text, if it was one number."""


class BroadcastArray(NamedTuple):
    """What one rank passed to a `broadcast`; the others' is filled unless it is the root's own memory."""

    key: Key
    """The same on all ranks."""
    is_root: bool
    access: MemoryAccess


class ArrayName(NamedTuple):
    """A name for a part of a segment."""

    name: str
    segment: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Publish(NamedTuple):
    """What the rank has done so far is before everything that acquires the key."""

    key: Key


class Acquire(NamedTuple):
    """What the rank does from now on is after all that was published under the keys.

    A key that nothing has published orders nothing.
    """

    keys: tuple[Key, ...]


class AccessLog(NamedTuple):
    """What one rank did in a checked cell, or in a part of it."""

    rank: int
    """Its number."""
    events: tuple[Publish | Acquire, ...] = ()
    """In program order."""
    accesses: tuple[MemoryAccess, ...] = ()
    """In the order of their intervals."""
    names: tuple[ArrayName, ...] = ()
    """Names that this rank has given to shared arrays."""
    total: int = 0
    """How many accesses there were: those of one line to one place in one interval are one above."""
    broadcasts: tuple[BroadcastArray, ...] = ()
    """In the order of their intervals."""
    notebook_names: tuple[ArrayName, ...] = ()
    """Names under which the notebook has delivered them."""


def distinct(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return offsets in ascending order, each once.

    `numpy.unique` does so with a table from version 2.3 on, in 30 times the time for multiples of 8.
    """
    ordered = np.sort(offsets, axis=None)
    is_new = np.ones(ordered.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def region_of(itemsize: int, offsets: npt.NDArray[np.int64]) -> Box | Elements:
    """Return elements, ascending, as a box, which is smaller, if they lie in rows, and rows of rows."""
    shape: list[int] = []
    strides: list[int] = []
    starts = offsets
    while starts.size > 1:
        steps = np.diff(starts)
        others = np.flatnonzero(steps != steps[0])
        length = int(others[0]) + 1 if others.size else starts.size
        if starts.size % length or (np.diff(starts.reshape(-1, length)) != steps[0]).any():
            return Elements(itemsize, offsets.tobytes())
        shape.insert(0, length)
        strides.insert(0, int(steps[0]))
        starts = starts[::length]
    return Box(int(offsets[0]), tuple(shape), tuple(strides), itemsize)
