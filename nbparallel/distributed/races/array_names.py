"""Names of arrays: which one to say for bytes of a segment."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from nbparallel.distributed.races.access_log import AccessLog, ArrayName, Box, region_of
from nbparallel.distributed.races.byte_sets import ByteSet, Overlap
from nbparallel.sharing.memory.array_layout import extent

Slices = tuple[range, ...]
"""What is taken of each axis."""


def _common_part(one: range, other: range) -> range | None:
    """Return the indices that two slices have in common; None: there are none."""
    coarse, fine = (one, other) if one.step >= other.step else (other, one)
    step, high = math.lcm(one.step, other.step), min(one[-1], other[-1])
    low = coarse.start + max(0, -(-(fine.start - coarse.start) // coarse.step)) * coarse.step
    for first in range(low, min(high, low + step - 1) + 1, coarse.step):
        if first in fine:
            return range(first, high + 1, step)
    return None


class _Axis(NamedTuple):
    number: int
    length: int
    stride: int
    """Positive."""


class NamedArray:
    """An array that has a name, and its axes in the order of memory.

    Attributes
    ----------
    owner : str
        ``"rank 2"``, if the name is another array on another rank; else empty.
    start, stop : int
        First byte in the segment, and the one after the last.
    nested : bool
        Each byte belongs to one index at most.
    """

    def __init__(self, name: ArrayName, owner: str = "") -> None:
        self.name, self.shape, self.itemsize = name.name, name.shape, name.itemsize
        self.owner = owner
        self._reversed = [stride < 0 for stride in name.strides]
        low, high = extent(name.shape, name.strides, name.itemsize)
        self.start, self.stop, self.nested = name.offset + low, name.offset + high, True
        lengths = enumerate(zip(name.shape, name.strides, strict=True))
        axes = (_Axis(number, length, abs(stride)) for number, (length, stride) in lengths if length > 1)
        self._axes = sorted(axes, key=lambda axis: axis.stride)
        inner = name.itemsize
        for axis in self._axes:
            self.nested &= axis.stride >= inner
            inner = axis.stride * axis.length

    def slices(self, touched: ByteSet) -> Slices | None:
        """Return what slices take just the elements in which bytes are touched; None: none do.

        Those from the first to the last one, in steps of the distance between runs, if they touch the same.
        """
        first, last = self._indices(touched.start), self._indices(touched.stop - 1)
        if not self.nested or touched.offsets is not None or first is None or last is None:
            return None
        steps = [1] * len(first)
        for _, stride in touched.dims:
            places = [place for place, axis in enumerate(self._axes) if stride % axis.stride == 0]
            for place in places[-1:]:
                steps[place] = stride // self._axes[place].stride
        spans = zip(first, last, steps, strict=True)
        taken = [range(low, high + 1, step) for low, high, step in spans]
        strides = tuple(part.step * axis.stride for part, axis in zip(taken, self._axes, strict=True))
        found = ByteSet(Box(touched.start, tuple(map(len, taken)), strides, min(touched.run, self.itemsize)))
        same = (found.run, found.dims) == (touched.run, touched.dims)
        return self._in_order(taken) if same and all(taken) else None

    def _indices(self, byte: int) -> list[int] | None:
        """Return the indices of the element that holds a byte, in the order of memory."""
        rest, indices = byte - self.start, list[int]()
        for axis in reversed(self._axes):
            index, rest = divmod(rest, axis.stride)
            if not 0 <= index < axis.length:
                return None
            indices.insert(0, index)
        return indices if 0 <= rest < self.itemsize else None

    def _in_order(self, taken: list[range]) -> Slices:
        """Return slices of the axes in the order of the shape, counted from the end of reversed ones."""
        slices = [range(1)] * len(self.shape)
        for axis, part in zip(self._axes, taken, strict=True):
            if self._reversed[axis.number]:
                part = range(axis.length - 1 - part[-1], axis.length - part.start, part.step)
            slices[axis.number] = part
        return tuple(slices)

    def written(self, slices: Slices) -> str:
        """Return what takes these slices: the name, and an index if it is not the whole array."""
        if all(part == range(length) for part, length in zip(slices, self.shape, strict=True)):
            # an array of one element is a counter: the user has typed an index
            return self.name + (f"[{', '.join('0' * len(slices))}]" if set(self.shape) == {1} else "")
        parts = [_written(part, length) for part, length in zip(slices, self.shape, strict=True)]
        while len(parts) > 2 and parts[-1] == parts[-2] == ":":
            parts.pop()
        return f"{self.name}[{', '.join(parts)}]"


def _written(part: range, length: int) -> str:
    if part == range(length) and length > 1:
        return ":"
    if len(part) == 1:
        return str(part.start)
    if part.step == 1:
        return f"{part.start}:{part[-1] + 1}"
    stop = part[-1] + 1 if part[-1] + part.step < length else ""
    return f"{part.start or ''}:{stop}:{part.step}"


class Place(NamedTuple):
    """Bytes, as a user would name them."""

    array: str
    """The name; empty: there is none."""
    indices: str
    """``grid[7]``; if there is no name, which bytes."""
    is_exact: bool = True
    """False: the bytes are within it."""
    owner: str = ""
    """The rank on which it is called so, if not on all."""

    def __str__(self) -> str:
        if not self.array:
            return self.indices
        return f"{'' if self.is_exact else 'within '}`{self.indices}`{f' of {self.owner}' * bool(self.owner)}"


class ArrayNames:
    """Names of a cell's shared arrays: the notebook's first, then those of the ranks.

    Parameters
    ----------
    names : iterable of ArrayName
        The notebook's.
    logs : iterable of AccessLog
        With names on ranks.
    """

    def __init__(self, names: Iterable[ArrayName], logs: Iterable[AccessLog]) -> None:
        self._arrays: defaultdict[int, list[NamedArray]] = defaultdict(list)
        of_ranks = ((f"rank {log.rank}", dict.fromkeys(log.names)) for log in logs)
        sources = [("", dict.fromkeys(names)), *of_ranks]
        meanings = Counter(name.name for name in {name for _, source in sources for name in source})
        known: set[ArrayName] = set()
        for owner, source in sources:
            new = [name for name in source if name not in known and all(name.shape)]
            known.update(new)
            for name in sorted(new, key=_preference):
                array = NamedArray(name, owner if meanings[name.name] > 1 else "")
                self._arrays[name.segment].append(array)
        self._starts = {segment: _beginnings(arrays) for segment, arrays in self._arrays.items()}

    def part_of(self, segment: int, byte: int) -> int:
        """Return the number of the named memory that holds a byte: arrays with bytes in common are one."""
        return bisect_right(self._starts.get(segment, []), byte)

    def place_of(self, segment: int, overlap: Overlap, *touched: ByteSet) -> Place:
        """Name the bytes that all of some sets touch, which are the overlap."""
        start, stop = overlap.start, overlap.stop
        array = self._array(segment, start, stop)
        if array is None:
            return Place("", f"bytes {start} to {stop - 1} of a shared array without a name", False)
        if overlap.runs is not None:
            slices = array.slices(ByteSet(region_of(overlap.run, overlap.runs)))
        elif all(one.is_solid for one in touched):
            slices = array.slices(ByteSet(Box(start, (stop - start,), (1,), 1)))
        else:
            slices = _in_common(array, touched)
        if slices is not None:
            return Place(array.name, array.written(slices), True, array.owner)
        return Place(array.name, array.name, False, array.owner)

    def _array(self, segment: int, start: int, stop: int) -> NamedArray | None:
        arrays = self._arrays.get(segment, ())
        return next((array for array in arrays if array.start <= start and stop <= array.stop), None)


def _preference(name: ArrayName) -> tuple[bool, int, int, str]:
    """Sort names that a user has chosen first, then large arrays, of which others are views."""
    array = NamedArray(name)
    return name.name.startswith("_"), array.start - array.stop, len(name.name), name.name


def _beginnings(arrays: Iterable[NamedArray]) -> list[int]:
    """Return where memory begins that named arrays hold together."""
    begins: list[int] = []
    end = -1
    for array in sorted(arrays, key=lambda array: array.start):
        if array.start >= end:
            begins.append(array.start)
        end = max(end, array.stop)
    return begins


def _in_common(array: NamedArray, touched: Iterable[ByteSet]) -> Slices | None:
    common: Slices | None = None
    for one in touched:
        slices = array.slices(one)
        if slices is None:
            return None
        parts = [_common_part(a, b) for a, b in zip(common or slices, slices, strict=True)]
        common = tuple(part for part in parts if part is not None)
        if len(common) < len(slices):
            return None
    return common
