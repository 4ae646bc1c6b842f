"""Sets of bytes that accesses touch, in a form in which two of them are quickly compared.

A box becomes runs of bytes at regular distances: lengths of 1 and strides of 0 are left out, negative strides
turned round, and what lies without a gap is one run.  ``m[2:5, :]`` of a C array is one run, ``m[:, 1]`` is
one of 8 bytes for each row.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.races.access_log import Box, Elements
from nbparallel.sharing.memory.array_layout import extent
from nbparallel.sharing.tensors import array_at

Offsets = npt.NDArray[np.int64]
Run = tuple[int, int]
"""How many, and how many bytes from one to the next."""


class ByteSet:
    """The bytes of a box or of elements, counted from the beginning of their segment.

    Attributes
    ----------
    start, stop : int
        First byte, and the one after the last.
    run : int
        Bytes without a gap, from each offset.
    dims : tuple of Run
        Number and distance of the runs, from the innermost dimension outwards; empty: there is one run, or
        `offsets` has them.
    offsets : int64 array, ascending, or None
        Where the runs begin, if they are irregular.
    period : int
        A divisor of all distances; 0 if there are none.
    nested : bool
        The runs of an inner dimension end before the next one of the outer dimension begins.
    """

    __slots__ = ("dims", "nested", "offsets", "period", "region", "run", "start", "stop")

    def __init__(self, region: Box | Elements) -> None:
        self.region = region
        self.offsets: Offsets | None = None
        self.dims: tuple[Run, ...] = ()
        self.period, self.nested, self.run = 0, True, region.itemsize
        if isinstance(region, Elements):
            self.offsets = np.frombuffer(region.offsets, np.int64)
            self.start = int(self.offsets[0])
            self.stop = int(self.offsets[-1]) + region.itemsize
            return
        low, high = extent(region.shape, region.strides, region.itemsize)
        self.start, self.stop = region.offset + low, region.offset + high
        if high - low > region.itemsize:
            self._join_runs(region)

    def _join_runs(self, region: Box) -> None:
        dims: list[Run] = []
        for stride, length in sorted((abs(s), n) for n, s in zip(region.shape, region.strides, strict=True)):
            if length == 1 or stride == 0:
                continue
            inner, step = dims[-1] if dims else (0, 0)
            if not dims and stride <= self.run:
                self.run += (length - 1) * stride
            elif dims and stride % step == 0 and stride <= inner * step:
                dims[-1] = inner + (length - 1) * (stride // step), step
            else:
                dims.append((length, stride))
        extent = self.run
        for length, stride in dims:
            self.nested &= stride >= extent
            extent += (length - 1) * stride
        self.dims = tuple(dims)
        self.period = math.gcd(*(stride for _, stride in dims))

    @property
    def is_solid(self) -> bool:
        """Whether it is one run."""
        return self.stop - self.start == self.run

    def last_runs(self, limits: Offsets) -> Offsets:
        """Return for each limit where the last run begins at or before it; -1 if none does.

        Only with offsets, or if the dimensions are nested.
        """
        if self.offsets is not None:
            places = np.searchsorted(self.offsets, limits, "right") - 1
            return np.where(places < 0, -1, self.offsets[places])
        rest = limits - self.start
        found = np.full_like(limits, self.start)
        for length, stride in reversed(self.dims):
            steps = np.minimum(rest // stride, length - 1) * stride
            found += steps
            rest -= steps
        return np.where(limits < self.start, -1, found)


MAX_WORK = 100_000
"""Steps that numpy tries before two regular boxes count as too hard: a few milliseconds."""
_BASE = 1 << 20
"""Address of a segment's beginning, for dummies: anything but 0.  Their memory is never read."""


class Overlap(NamedTuple):
    """Bytes that two sets have in common."""

    start: int
    """Of a range that holds all of them."""
    stop: int
    certain: bool = True
    """False: whether there are any was too hard to find out."""
    runs: Offsets | None = None
    """Where elements of one side begin that touch the other, if they are irregular."""
    run: int = 0
    """Bytes of one of these runs."""


def find_overlap(one: ByteSet, other: ByteSet) -> Overlap | None:
    """Return what two sets of bytes of a segment have in common; None: nothing."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    if start >= stop:
        return None
    if one.offsets is not None and (other.offsets is None or one.offsets.size <= other.offsets.size):
        return _of_elements(one.offsets, one.run, other, start, stop)
    if other.offsets is not None:
        return _of_elements(other.offsets, other.run, one, start, stop)
    if one.is_solid and other.is_solid:
        return Overlap(start, stop)
    if have_gap(one, other):
        return None
    try:
        if not np.shares_memory(_dummy(one), _dummy(other), max_work=MAX_WORK):  # type: ignore[arg-type]  # any number
            return None
    except np.exceptions.TooHardError:
        return Overlap(start, stop, certain=False)
    return Overlap(start, stop)


def have_gap(one: ByteSet, other: ByteSet) -> bool:
    """Return whether both repeat at a distance at which they never meet, like the columns of an array."""
    period = math.gcd(one.period, other.period)
    if not period:
        return False
    apart = (other.start - one.start) % period
    return apart >= one.run and period - apart >= other.run


def _of_elements(some: Offsets, run: int, other: ByteSet, start: int, stop: int) -> Overlap | None:
    """Compare each element with the other side, which can name its last run before an offset."""
    if not other.nested:
        return Overlap(start, stop, certain=False)
    first, end = np.searchsorted(some, (start - run + 1, stop))
    some = some[first:end]
    last = other.last_runs(some + run - 1)
    hit = some[(last >= 0) & (last + other.run > some)]
    if not hit.size:
        return None
    return Overlap(max(start, int(hit[0])), min(stop, int(hit[-1]) + run), True, hit, run)


@lru_cache(maxsize=4096)
def _dummy(box: ByteSet) -> npt.NDArray[np.uint8]:
    """Return an array with the shape of a box, at an address where there need not be memory."""
    lengths, strides = zip((box.run, 1), *box.dims, strict=True)
    return array_at(None, _BASE + box.start, lengths, strides=strides, writable=False)
