"""Recorder of accesses to shared arrays: what each line has touched since the last event of this rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.races.access_log import (
    POSSIBLE,
    READ,
    WRITE,
    Box,
    Elements,
    MemoryAccess,
    Site,
    distinct,
    region_of,
)


class UserLines:
    """Finds the innermost line of the user's.

    A frame knows its line only by counting through a table; so the answer is kept for each instruction.
    `CallSite` does the same for operations, where one file is meant and every nanosecond counts.

    Parameters
    ----------
    label_of : callable
        Returns what messages call a file: empty for the cell that runs; None: a library's.
    """

    def __init__(self, label_of: Callable[[str], str | None]) -> None:
        self.label_of = label_of
        self._codes: dict[int, tuple[CodeType, str | None, dict[int, Site]]] = {}
        """By identity: to find out that two code objects are equal is slow."""

    def current(self, depth: int = 2) -> Site:
        """Return the line that runs; this and so many calls above it are not the user's."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code))
            if known is None:
                known = self._codes[id(code)] = code, self.label_of(code.co_filename), {}
            if known[1] is not None:
                site = known[2].get(frame.f_lasti)
                if site is None:
                    site = known[2][frame.f_lasti] = Site(known[1], frame.f_lineno)
                return site
            frame = frame.f_back
        return Site("", 0)


AnyArray = npt.NDArray[Any]
Locate = Callable[[AnyArray], tuple[int, int] | None]
"""Returns the segment of an array, and the offset there of the element with all indices 0."""
_Line = tuple[int, Site, int]
"""Segment, site, kind."""
_Part = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""The fields of a `Box`."""
MANY = 4096
"""Parts of one line that are kept one by one; of more, the elements."""
FEW = 256
"""Elements of a part that are kept singly after `MANY` parts."""
LIMIT_NBYTES = 32 << 20
"""What `AccessRecorder.nbytes` should not exceed: then it is time to `take`."""
ACCESS_NBYTES = 200
"""About what an access takes."""
_NUMBERS, _NUMPY = (int, float, complex, bool), (np.generic, np.ndarray)
_VARIOUS = object()
"""Stands for several values that were written to one place."""


class AccessRecorder:
    """Records accesses of one rank.

    Parameters
    ----------
    locate : callable
        See `Locate`; None: the memory is private.
    lines : UserLines
        Finds the user's line that runs.

    Attributes
    ----------
    interval : int
        Which of this rank's intervals it is.
    nbytes : int
        About how large what `take` returns has become.
    """

    def __init__(self, locate: Locate, lines: UserLines) -> None:
        self.locate, self.lines = locate, lines
        self.interval = self.count = self.nbytes = 0
        self._accesses: list[MemoryAccess] = []
        self._parts: dict[_Line, dict[_Part, object]] = {}
        """With the number that was stored there."""
        self._many: dict[tuple[_Line, int], _ManyElements] = {}
        """By the size of an element, too."""
        self._exposed: list[tuple[_Line, _Part]] = []

    # -- what arrays call ------------------------------------------------------------------------------

    def touch(self, array: AnyArray, kind: int, value: object = None) -> None:
        """Record that all elements of an array are touched; `value` is what is assigned to them."""
        if array.size and (place := self.locate(array)) is not None:
            self.touch_at(place, array, kind, value)

    def touch_at(self, place: tuple[int, int], array: AnyArray, kind: int, value: object = None) -> None:
        """Record that all elements of an array, which has some, are touched; its place is known."""
        self.count += 1
        part = place[1], array.shape, array.strides, array.itemsize
        self._add((place[0], self.lines.current(), kind), part, one_value(value))

    def element(self, place: tuple[int, int], itemsize: int, kind: int, stored: object = None) -> None:
        """Record that one element is touched, whose segment and offset are known."""
        self.count += 1
        self._add((place[0], self.lines.current(3), kind), (place[1], (), (), itemsize), stored)

    def elements(
        self, array: AnyArray, offsets: npt.NDArray[np.int64], kind: int, value: object = None
    ) -> None:
        """Record that the elements of an array at some offsets, in bytes from its first, are touched."""
        if offsets.size and (place := self.locate(array)) is not None:
            self.count += 1
            line = place[0], self.lines.current(), kind
            self._add_many(line, array.itemsize, offsets + place[1], one_value(value))

    def expose(self, array: AnyArray, door: str) -> None:
        """Record that code which numpy does not see may touch an array from now until the cell ends."""
        if not array.size or (place := self.locate(array)) is None:
            return
        self.count += 1
        site = self.lines.current()._replace(door=door)
        kind = (READ | WRITE if array.flags.writeable else READ) | POSSIBLE
        exposed = (place[0], site, kind), (place[1], array.shape, array.strides, array.itemsize)
        if exposed not in self._exposed:
            self._exposed.append(exposed)
            self._add(*exposed, None)

    def _add(self, line: _Line, part: _Part, stored: object) -> None:
        parts = self._parts.setdefault(line, {})
        if len(parts) >= MANY and part not in parts and math.prod(part[1]) <= FEW:
            offset, shape, strides, itemsize = part
            axes = (np.arange(length) * stride for length, stride in zip(shape, strides, strict=True))
            self._add_many(line, itemsize, np.asarray(sum(np.ix_(*axes), offset)).reshape(-1), stored)
        elif parts.setdefault(part, stored) != stored:
            parts[part] = _VARIOUS

    def _add_many(self, line: _Line, itemsize: int, offsets: npt.NDArray[np.int64], stored: object) -> None:
        self._many.setdefault((line, itemsize), _ManyElements(stored)).add(offsets, stored)

    # -- intervals -------------------------------------------------------------------------------------

    def next_interval(self) -> None:
        """Have what follows belong to the next interval of this rank."""
        self._settle()
        self.interval += 1
        for line, part in self._exposed:
            self._add(line, part, None)

    def _settle(self) -> None:
        for line, parts in self._parts.items():
            single: dict[int, dict[int, object]] = {}
            for part, stored in parts.items():
                if part[1]:
                    self._note(line, Box(*part), stored)
                else:
                    single.setdefault(part[3], {})[part[0]] = stored
            for itemsize, found in single.items():
                values = set(found.values())
                offsets = np.fromiter(found, np.int64, len(found))
                self._add_many(line, itemsize, offsets, values.pop() if len(values) == 1 else _VARIOUS)
        for (line, itemsize), many in self._many.items():
            self._note(line, region_of(itemsize, many.all()), many.stored)
        self._parts.clear()
        self._many.clear()

    def _note(self, line: _Line, region: Box | Elements, stored: object) -> None:
        self.nbytes += ACCESS_NBYTES + (len(region.offsets) if isinstance(region, Elements) else 0)
        known = stored is not None and stored is not _VARIOUS
        shown = repr(stored).encode() if known else None
        self._accesses.append(MemoryAccess(self.interval, *line, region, shown))

    def access_to(self, place: tuple[int, int], array: AnyArray, kind: int) -> MemoryAccess:
        """Return an access to all elements of an array whose place is known, without recording it."""
        box = Box(place[1], array.shape, array.strides, array.itemsize)
        return MemoryAccess(self.interval, place[0], self.lines.current(), kind, box)

    def take(self) -> tuple[tuple[MemoryAccess, ...], int]:
        """Return what was recorded since the last call, and how many accesses that were."""
        self._settle()
        found = tuple(self._accesses), self.count
        self._accesses, self.count, self.nbytes = [], 0, 0
        return found


class _ManyElements:
    """Offsets of elements, of which many may come again and again: they are sorted now and then."""

    def __init__(self, stored: object) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []
        self._size, self._sorted = 0, MANY
        self.stored = stored

    def add(self, offsets: npt.NDArray[np.int64], stored: object) -> None:
        self._parts.append(offsets)
        self._size += offsets.size + 1
        if self.stored != stored:
            self.stored = _VARIOUS
        if self._size > 2 * self._sorted:  # as many have come as there were: so it costs little altogether
            self._parts = [self.all()]
            self._size = self._parts[0].size
            self._sorted = max(MANY, self._size)

    def all(self) -> npt.NDArray[np.int64]:
        """Return all, each once, in ascending order."""
        return distinct(np.concatenate(self._parts))


def one_value(value: object) -> object:
    """Return one number that was written, to be compared with what other ranks wrote; else None."""
    if type(value) not in _NUMBERS and isinstance(value, _NUMPY) and not value.ndim:
        value = value.item()
    return value if type(value) in _NUMBERS else None


def offsets_at(array: AnyArray, key: Any) -> npt.NDArray[np.int64]:
    """Return the offsets, in bytes from an array's first element, of what an index takes of it.

    Of each axis the index takes the contributions of that axis: so nothing is as large as the array, and
    numpy itself interprets the index.
    """
    shape = array.shape
    if len(shape) == 1 and isinstance(key, np.ndarray | list):  # needs nothing as long as the array
        chosen = np.asarray(key)
        if chosen.dtype.kind == "b" and chosen.shape == shape:
            return np.flatnonzero(chosen) * array.strides[0]
        if chosen.dtype.kind in "iu":
            at: npt.NDArray[np.int64] = chosen.astype(np.int64).reshape(-1)
            return np.where(at < 0, at + shape[0], at) * array.strides[0]
    total: Any = np.broadcast_to(np.zeros((), np.int64), shape)[key]
    for axis, (length, stride) in enumerate(zip(shape, array.strides, strict=True)):
        along = (np.arange(length, dtype=np.int64) * stride).reshape(
            [length if other == axis else 1 for other in range(len(shape))]
        )
        total = total + np.broadcast_to(along, shape)[key]
    offsets: npt.NDArray[np.int64] = np.asarray(total, np.int64).reshape(-1)
    return offsets
