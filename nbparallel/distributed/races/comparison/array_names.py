"""Names of arrays: which one to say for bytes of a segment."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from nbparallel.distributed.races.access_log import ArrayName, Box
from nbparallel.distributed.races.comparison.array_indices import NamedArray, Slices
from nbparallel.distributed.races.comparison.byte_sets import ByteSet
from nbparallel.distributed.races.comparison.joined_logs import RankLog
from nbparallel.distributed.races.comparison.overlap import Overlap


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
        owner = f" of {self.owner}" if self.owner else ""
        return f"{'' if self.is_exact else 'within '}`{self.indices}`{owner}"


class ArrayNames:
    """Names of a cell's shared arrays: the notebook's first, then those of the ranks.

    Parameters
    ----------
    names : iterable of ArrayName
        The notebook's.
    logs : iterable of RankLog
        With names on ranks.
    """

    def __init__(self, names: Iterable[ArrayName], logs: Iterable[RankLog]) -> None:
        self._arrays: defaultdict[int, list[NamedArray]] = defaultdict(list)
        logs = list(logs)
        notebook = dict.fromkeys(names)
        sources = [("", notebook), *((f"rank {log.rank}", log.names) for log in logs)]
        meanings = Counter(name.name for name in {name for _, source in sources for name in source})
        known: set[ArrayName] = set()
        for owner, source in sources:
            new = [name for name in source if name not in known and all(name.shape)]
            known.update(new)
            for name in sorted(new, key=_preference):
                array = NamedArray(name, owner if meanings[name.name] > 1 else "")
                self._arrays[name.segment].append(array)
        self._starts: dict[int, list[int]] = {}
        for segment, arrays in self._arrays.items():
            self._starts[segment] = _beginnings(arrays)

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
            slices = array.slices_of_runs(overlap.runs, overlap.run)
        elif all(one.is_solid for one in touched):
            slices = array.slices(ByteSet(Box(start, (stop - start,), (1,), 1)))
        else:
            slices = _in_common(array, touched)
        if slices is not None:
            return Place(array.name, array.written(slices), True, array.owner)
        runs, run = overlap.runs, overlap.run
        if runs is None and len(touched) == 1:
            runs, run = touched[0].offsets, touched[0].run
        if runs is not None and (listed := array.listed(runs, run)):
            return Place(array.name, listed, True, array.owner)
        return Place(array.name, array.written(array.around(start, stop)), False, array.owner)

    def touching(self, segment: int, start: int, stop: int) -> list[NamedArray]:
        """Return the arrays that a range of bytes touches, without views of others."""
        found: list[NamedArray] = []
        for array in self._arrays.get(segment, ()):
            inside = array.start < stop and array.stop > start
            if inside and not any(_holds(other, array) for other in found):
                found.append(array)
        return found

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


def _holds(array: NamedArray, other: NamedArray) -> bool:
    return array.start <= other.start and other.stop <= array.stop


def _in_common(array: NamedArray, touched: Iterable[ByteSet]) -> Slices | None:
    common: Slices | None = None
    for one in touched:
        slices = array.slices(one)
        if slices is None:
            return None
        if common is None:
            common = slices
            continue
        parts = [a.in_common(b) for a, b in zip(common, slices, strict=True)]
        if None in parts:
            return None
        common = tuple(part for part in parts if part is not None)
    return common
