"""Overlap of two sets of bytes: none, some, or too hard to find out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.races.comparison.byte_sets import ByteSet, Offsets

MAX_WORK = 100_000
"""Steps that numpy tries before two regular boxes count as too hard: a few milliseconds."""
MAX_RUNS = 1 << 20
"""Runs of a box that are written out one by one to compare them."""
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
    """Where runs of one side begin that touch the other, if they were written out."""
    run: int = 0
    """Bytes of one of these runs."""


def find_overlap(one: ByteSet, other: ByteSet) -> Overlap | None:
    """Return what two sets of bytes of a segment have in common; None: nothing."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    if start >= stop:
        return None
    if one.offsets is not None or other.offsets is not None:
        return _of_irregular(one, other, start, stop)
    if not (one.dims or other.dims):
        return Overlap(start, stop)
    for solid, box in ((one, other), (other, one)):
        if not solid.dims and box.nested:
            return Overlap(start, stop) if box.is_touched(solid.start, solid.stop) else None
    if have_gap(one, other):
        return None
    try:
        if not np.shares_memory(_dummy(one), _dummy(other), max_work=MAX_WORK):  # type: ignore[arg-type]  # any number
            return None
    except np.exceptions.TooHardError:
        return _of_irregular(one, other, start, stop)
    return Overlap(start, stop)


def have_gap(one: ByteSet, other: ByteSet) -> bool:
    """Return whether both repeat at a distance at which they never meet, like the columns of an array."""
    period = math.gcd(one.period, other.period)
    if not period:
        return False
    apart = (other.start - one.start) % period
    return apart >= one.run and period - apart >= other.run


def _of_irregular(one: ByteSet, other: ByteSet, start: int, stop: int) -> Overlap | None:
    """Compare each run of one side with the other side, which can name its last run before an offset."""
    for solid, scattered in ((one, other), (other, one)):
        if solid.is_solid and scattered.offsets is not None:
            first, last = np.searchsorted(scattered.offsets, (start - scattered.run + 1, stop))
            return _of_hits(scattered.offsets[first:last], scattered.run, start, stop)
    sides = [(one, other), (other, one)]
    able = [(a, b) for a, b in sides if _can_be_written_out(a) and b.nested]
    if not able:
        if not (_can_be_written_out(one) and _can_be_written_out(other)):
            return Overlap(start, stop, certain=False)
        able = sides
    few, many = min(able, key=lambda pair: pair[0].count)
    runs = few.run_starts()
    runs = runs[(runs < stop) & (runs + few.run > start)]
    if many.nested:
        last = many.last_runs(runs + few.run - 1)
    else:
        starts = many.run_starts()
        places = np.searchsorted(starts, runs + few.run - 1, "right") - 1
        last = np.where(places < 0, -1, starts[places])
    return _of_hits(runs[(last >= 0) & (last + many.run > runs)], few.run, start, stop)


def _of_hits(hit: Offsets, run: int, start: int, stop: int) -> Overlap | None:
    if not hit.size:
        return None
    return Overlap(max(start, int(hit[0])), min(stop, int(hit[-1]) + run), True, hit, run)


def _can_be_written_out(touched: ByteSet) -> bool:
    return touched.offsets is not None or touched.count <= MAX_RUNS


class _Dummy:
    """Stands for memory of which only the address counts."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _dummy(box: ByteSet) -> npt.NDArray[np.uint8]:
    """Return an array with the shape of a box, at an address where there need not be memory."""
    if box.dummy is None:
        lengths, strides = zip((box.run, 1), *box.dims, strict=True)
        box.dummy = np.asarray(
            _Dummy(
                {
                    "version": 3, "typestr": "|u1", "data": (_BASE + box.start, True),
                    "shape": lengths, "strides": strides,
                }
            )
        )  # fmt: skip
    return box.dummy
