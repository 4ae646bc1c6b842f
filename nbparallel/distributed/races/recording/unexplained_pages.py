"""Unexplained pages: what a rank wrote in shared arrays, by the processor's account, without an access."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.races.access_log import Box, Elements
from nbparallel.distributed.races.recording.written_pages import PageWatch
from nbparallel.sharing.memory.array_layout import extent

AnyArray = npt.NDArray[Any]
Place = tuple[int, int]
"""Segment, and offset in it."""
PAGE = mmap.PAGESIZE
MOST_RUNS = 1 << 16
"""Rows of a strided array that are looked at one by one; of more, all from the first to the last."""


class WatchedArrays:
    """The memory of some shared arrays, whose written pages are noted while it is entered.

    Parameters
    ----------
    arrays : mapping of (segment, first byte) to array
        Plain arrays.
    """

    def __init__(self, arrays: Mapping[Place, AnyArray]) -> None:
        self._places: list[tuple[int, int, Place]] = []
        for place, array in arrays.items():
            low, high = extent(array.shape, array.strides, array.itemsize)
            first = array.__array_interface__["data"][0]
            self._places.append((first + low, first + high, place))
        self.watch = PageWatch((low, high - low) for low, high, _ in self._places)

    def unexplained(self, written: Iterable[tuple[int, Box | Elements]]) -> list[tuple[int, int, int]]:
        """Return segment, start and stop of bytes on written pages that lie in no region of `written`."""
        pages = self.watch.written()
        if not pages:
            return []
        explained: dict[int, set[int]] = {}
        for segment, region in set(written):
            known = explained.setdefault(segment, set())
            for start, stop in runs(region):
                known.update(range(start // PAGE, (stop - 1) // PAGE + 1))
        found = []
        for address, nbytes in pages:
            for low, high, (segment, offset) in self._places:
                begin, end = max(address, low), min(address + nbytes, high)
                shift = offset - low
                known = explained.get(segment, set())
                while begin < end:
                    stop = min(((begin + shift) // PAGE + 1) * PAGE - shift, end)
                    if (begin + shift) // PAGE not in known:
                        found.append((segment, begin + shift, stop + shift))
                    begin = stop
        return _merged(found)


def runs(region: Box | Elements) -> Iterator[tuple[int, int]]:
    """Yield first byte and one past the last of parts of a region: its rows, if there are not too many.

    Together they lie on the pages of the region, and on no others.
    """
    if isinstance(region, Elements):
        offsets = np.frombuffer(region.offsets, np.int64)
        first, last = offsets // PAGE, (offsets + region.itemsize - 1) // PAGE
        ends = np.flatnonzero(first[1:] > last[:-1] + 1)  # no page between others is passed over
        begins = np.append(0, ends + 1)
        stops = np.append(offsets[ends], offsets[-1]) + region.itemsize
        yield from zip(offsets[begins].tolist(), stops.tolist(), strict=True)
        return
    axes = sorted(zip(region.strides, region.shape, strict=True), key=lambda axis: -abs(axis[0]))
    outer: list[tuple[int, int]] = []
    count = 1
    while axes and abs(axes[0][0]) > PAGE and count * axes[0][1] <= MOST_RUNS:
        outer.append(axes.pop(0))
        count *= outer[-1][1]
    low = sum(min(0, stride * (length - 1)) for stride, length in axes)
    high = sum(max(0, stride * (length - 1)) for stride, length in axes) + region.itemsize
    for steps in product(*(range(0, stride * length, stride) for stride, length in outer)):
        yield region.offset + sum(steps) + low, region.offset + sum(steps) + high


def _merged(found: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return ranges in order, those that touch or lie on one page as one: which was written is not known."""
    merged: list[tuple[int, int, int]] = []
    for segment, start, stop in sorted(found):
        if (
            merged
            and merged[-1][0] == segment
            and (merged[-1][2] >= start or (merged[-1][2] - 1) // PAGE == start // PAGE)
        ):
            merged[-1] = segment, merged[-1][1], max(stop, merged[-1][2])
        else:
            merged.append((segment, start, stop))
    return merged
