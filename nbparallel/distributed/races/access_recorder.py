"""Recorder of accesses to shared arrays: what each line has touched since the last event of this rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

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
)
from nbparallel.distributed.runtime.call_site import is_library, is_ours
from nbparallel.transfer.cell_sources import source_label


class UserLines:
    """Finds the innermost line of the user's, as an index into `sites`.

    A frame knows its line only by counting through a table; so the answer is kept for each instruction.
    `CallSite` does the same for operations, where one file is meant and every nanosecond counts.

    Parameters
    ----------
    label_of : callable
        Returns what messages call a file: empty for the cell that runs; None: a library's.
    """

    def __init__(self, label_of: Callable[[str], str | None]) -> None:
        self.sites: list[Site] = []
        self._label_of = label_of
        self._indices: dict[Site, int] = {}
        self._codes: dict[int, tuple[CodeType, str | None, dict[int, int]]] = {}
        """By identity: to find out that two code objects are equal is slow."""

    def current(self, depth: int = 1) -> int:
        """Return the index of the line that runs, `depth` frames up or above."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code))
            if known is None:
                known = self._codes[id(code)] = code, self._label_of(code.co_filename), {}
            if known[1] is not None:
                index = known[2].get(frame.f_lasti)
                if index is None:
                    index = known[2][frame.f_lasti] = self.index(Site(known[1], frame.f_lineno))
                return index
            frame = frame.f_back
        return self.index(Site("", 0))

    def through(self, index: int, door: str) -> int:
        """Return the index of the same line, through a door."""
        return self.index(self.sites[index]._replace(door=door))

    def index(self, site: Site) -> int:
        """Return the index of a site."""
        index = self._indices.get(site)
        if index is None:
            index = self._indices[site] = len(self.sites)
            self.sites.append(site)
        return index

    def is_users(self, filename: str) -> bool:
        """Whether a file is no library's."""
        return self._label_of(filename) is not None

    def called_from_library(self, depth: int = 1) -> bool:
        """Whether the code `depth` frames up is a library's."""
        code = sys._getframe(depth).f_code
        return self._label_of(code.co_filename) is None


def label_function(filename: str) -> Callable[[str], str | None]:
    """Return what `UserLines` asks for labels, for the cell that is compiled as `filename`."""

    def label_of(name: str) -> str | None:
        if name == filename:
            return ""
        if label := source_label(name):
            return label
        if name.startswith("<") or is_ours(name) or is_library(os.path.abspath(name)):
            return None
        return os.path.basename(name)

    return label_of


AnyArray = npt.NDArray[Any]
Locate = Callable[[AnyArray], tuple[int, int] | None]
"""Returns the segment of an array, and the offset there of the element with all indices 0."""
_Kept = tuple[int, int, int, int]
"""Segment, site, kind, size of an element."""
_Line = tuple[int, int, int]
"""Segment, site, kind."""
_Part = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""The fields of a `Box`."""
MANY = 4096
"""Single elements of one line that are kept as a set, and boxes; more, as an array."""
FEW = 256
"""Elements of a box that are kept singly after `MANY` boxes."""
LIMIT_NBYTES = 32 << 20
"""What `AccessRecorder.nbytes` should not exceed: then it is time to `take`."""
ACCESS_NBYTES = 200
"""About what an access takes."""
_NUMBERS = (int, float, complex, bool)
_VARIOUS = object()
"""Stands for several values that were written to one place."""


class Recorded(NamedTuple):
    """What was recorded since the last time."""

    accesses: tuple[MemoryAccess, ...]
    number: int
    """How many there were: those of one line to one place in one interval are one above."""


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
        self._elements: dict[_Kept, set[int]] = {}
        self._many: dict[_Kept, _ManyElements] = {}
        self._boxes: dict[_Line, dict[_Part, object]] = {}
        self._values: dict[_Kept, object] = {}
        self._exposed: list[tuple[_Line, _Part]] = []

    # -- what arrays call ------------------------------------------------------------------------------

    def read(self, array: AnyArray, *, door: str = "") -> None:
        """Record that all elements are read; through a door, that they may be."""
        self.touch(array, READ, door=door)

    def write(self, array: AnyArray, value: object = None, *, door: str = "") -> None:
        """Record that all elements are written; `value` is what is assigned to them."""
        self.touch(array, WRITE, value, door=door)

    def touch(self, array: AnyArray, kind: int, value: object = None, *, door: str = "") -> None:
        """Record that all elements of an array are touched."""
        if array.size and (place := self.locate(array)) is not None:
            self.touch_at(place, array, kind, value, door=door)

    def touch_at(
        self,
        place: tuple[int, int],
        array: AnyArray,
        kind: int,
        value: object = None,
        *,
        door: str = "",
        depth: int = 2,
    ) -> None:
        """Record that all elements of an array, which has some, are touched; its place is known.

        At least `depth` frames above are not the user's.
        """
        self.count += 1
        site = self.lines.current(depth)
        if door:
            site, kind = self.lines.through(site, door), kind | POSSIBLE
        stored = one_value(value) if kind & WRITE and value is not None else None
        segment, offset = place
        if array.dtype.names is None:
            if array.ndim:
                part = offset, array.shape, array.strides, array.itemsize
                self._add_box((segment, site, kind), part, array.size, stored)
            else:
                self._add_element((segment, site, kind, array.itemsize), offset, stored)
            return
        for first, shape, strides, itemsize in _dense_parts(array):
            part = offset + first, shape, strides, itemsize
            self._add_box((segment, site, kind), part, array.size, stored)

    def _add_box(self, kept: _Line, part: _Part, size: int, stored: object) -> None:
        boxes = self._boxes.get(kept)
        if boxes is None:
            boxes = self._boxes[kept] = {}
        if len(boxes) >= MANY and size <= FEW:
            offset, shape, strides, itemsize = part
            self._add_many((*kept, itemsize), offset + _offsets_of(shape, strides), stored)
        elif boxes.setdefault(part, stored) != stored:
            boxes[part] = _VARIOUS

    def element(self, place: tuple[int, int], itemsize: int, kind: int, stored: object = None) -> None:
        """Record that one element is touched, whose segment and offset are known; called by its array."""
        self.count += 1
        kept = place[0], self.lines.current(3), kind, itemsize
        found = self._elements.get(kept)
        if found is None or len(found) >= MANY or self._values[kept] != stored:
            self._add_element(kept, place[1], stored)
        else:
            found.add(place[1])

    def elements(
        self, array: AnyArray, offsets: npt.NDArray[np.int64], kind: int, value: object = None
    ) -> None:
        """Record that the elements of an array at some offsets, in bytes from its first, are touched."""
        if not offsets.size or (place := self.locate(array)) is None:
            return
        self.count += 1
        site, stored = self.lines.current(), one_value(value) if kind & WRITE else None
        one = array[(0,) * array.ndim + (Ellipsis,)] if array.dtype.names is not None else array
        for part, shape, strides, itemsize in _dense_parts(one):
            at = offsets + (place[1] + part)
            if one is not array and shape:  # a field that is an array itself
                at = (at[:, None] + _offsets_of(shape, strides)).reshape(-1)
            self._add_many((place[0], site, kind, itemsize), at, stored)

    def expose(self, array: AnyArray, door: str) -> None:
        """Record that code which numpy does not see may touch an array from now until the cell ends."""
        if not array.size or (place := self.locate(array)) is None:
            return
        self.count += 1
        site = self.lines.through(self.lines.current(), door)
        kind = (READ | WRITE if array.flags.writeable else READ) | POSSIBLE
        kept = place[0], site, kind
        part = place[1], array.shape, array.strides, array.itemsize
        if (kept, part) not in self._exposed:
            self._exposed.append((kept, part))
            self._add_box(kept, part, array.size, None)

    def _add_element(self, kept: _Kept, offset: int, stored: object) -> None:
        found = self._elements.get(kept)
        if found is None:
            found = self._elements[kept] = set()
            self._values.setdefault(kept, stored)
        found.add(offset)
        if self._values[kept] != stored:
            self._values[kept] = _VARIOUS
        if len(found) >= MANY:
            self._add_many(kept, np.fromiter(found, np.int64, len(found)), self._values[kept])
            found.clear()

    def _add_many(self, kept: _Kept, offsets: npt.NDArray[np.int64], stored: object) -> None:
        found = self._many.get(kept)
        if found is None:
            found = self._many[kept] = _ManyElements()
            self._values.setdefault(kept, stored)
        found.add(offsets)
        if self._values[kept] != stored:
            self._values[kept] = _VARIOUS

    # -- intervals -------------------------------------------------------------------------------------

    def next_interval(self) -> None:
        """Have what follows belong to the next interval of this rank."""
        self._settle()
        self.interval += 1
        for kept, part in self._exposed:
            self._boxes.setdefault(kept, {})[part] = None

    def _settle(self) -> None:
        add, interval = self._accesses.append, self.interval
        for (segment, site, kind), boxes in self._boxes.items():
            self.nbytes += ACCESS_NBYTES * len(boxes)
            for part, stored in boxes.items():
                add(MemoryAccess(interval, segment, site, kind, Box(*part), _shown(stored)))
        for kept in self._elements.keys() | self._many.keys():
            single = self._elements.get(kept, set())
            many = self._many.get(kept, _ManyElements())
            many.add(np.fromiter(single, np.int64, len(single)))
            segment, site, kind, itemsize = kept
            region = _as_region(itemsize, many.all())
            self.nbytes += ACCESS_NBYTES + (len(region.offsets) if isinstance(region, Elements) else 0)
            add(MemoryAccess(interval, segment, site, kind, region, _shown(self._values.get(kept))))
        self._boxes.clear()
        self._elements.clear()
        self._many.clear()
        self._values.clear()

    def access_to(self, array: AnyArray, kind: int) -> MemoryAccess | None:
        """Return an access to all elements of an array, without recording it; None: its memory is private."""
        if not array.size or (place := self.locate(array)) is None:
            return None
        box = Box(place[1], array.shape, array.strides, array.itemsize)
        return MemoryAccess(self.interval, place[0], self.lines.current(), kind, box)

    def take(self) -> Recorded:
        """Return what was recorded since the last call."""
        self._settle()
        found = Recorded(tuple(self._accesses), self.count)
        self._accesses, self.count, self.nbytes = [], 0, 0
        return found


class _ManyElements:
    """Offsets of elements, of which many may come again and again: they are sorted now and then."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []
        self._size, self._sorted = 0, MANY

    def add(self, offsets: npt.NDArray[np.int64]) -> None:
        self._parts.append(offsets)
        self._size += offsets.size + 1
        if self._size > 2 * self._sorted:  # as many have come as there were: so it costs little altogether
            self._parts = [self.all()]
            self._size = self._parts[0].size
            self._sorted = max(MANY, self._size)

    def all(self) -> npt.NDArray[np.int64]:
        """Return all, each once, in ascending order."""
        return distinct(np.concatenate(self._parts))


def _dense_parts(array: AnyArray) -> list[_Part]:
    """Return offset, shape, strides and size of an element of what has no gaps within its elements."""
    names = array.dtype.names
    if names is None or _has_no_gaps(array.dtype):
        return [(0, array.shape, array.strides, array.itemsize)]
    assert array.dtype.fields is not None
    found = []
    for name in names:
        first = array.dtype.fields[name][1]
        for offset, shape, strides, itemsize in _dense_parts(array[name]):
            found.append((first + offset, shape, strides, itemsize))
    return found


def _has_no_gaps(dtype: np.dtype[Any]) -> bool:
    if dtype.subdtype is not None:
        dtype = dtype.subdtype[0]
    if dtype.names is None:
        return True
    assert dtype.fields is not None
    fields = [dtype.fields[name][0] for name in dtype.names]
    return sum(field.itemsize for field in fields) == dtype.itemsize and all(map(_has_no_gaps, fields))


def _offsets_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> npt.NDArray[np.int64]:
    total = np.zeros((), np.int64)
    for length, stride in zip(shape, strides, strict=True):
        total = total[..., None] + np.arange(length, dtype=np.int64) * stride
    return total.reshape(-1)


def _as_region(itemsize: int, offsets: npt.NDArray[np.int64]) -> Box | Elements:
    """Return elements at equal distances as a box, which is smaller."""
    if offsets.size == 1:
        return Box(int(offsets[0]), (1,), (itemsize,), itemsize)
    steps = np.diff(offsets)
    if (steps == steps[0]).all():
        return Box(int(offsets[0]), (offsets.size,), (int(steps[0]),), itemsize)
    return Elements(itemsize, offsets.tobytes())


def _shown(stored: object) -> bytes | None:
    return None if stored is None or stored is _VARIOUS else repr(stored).encode()


def one_value(value: object) -> object:
    """Return one number that was written, to be compared with what other ranks wrote; else None."""
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        number = value.item()
        return number if type(number) in _NUMBERS else None
    return None


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
