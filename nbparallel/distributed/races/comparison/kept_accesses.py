"""Kept accesses: the last ones of a line of one rank, one for each place, and how to find those near."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.races.access_log import POSSIBLE, WRITE
from nbparallel.distributed.races.comparison.byte_sets import ByteSet

FEW = 64
"""Accesses of one line that are looked through one by one; more, with numpy."""


class KeptAccess:
    """The last access of a line to a place.

    Attributes
    ----------
    bytes : ByteSet
        The place.
    interval : int
        When it was.
    stored : bytes or None
        What was written to each element, if it was one value.
    differed : int
        The last interval in which something else was written there; -1: none.
    """

    __slots__ = ("bytes", "differed", "interval", "slot", "start", "stop", "stored")

    def __init__(self, touched: ByteSet) -> None:
        self.bytes = touched
        self.start, self.stop = touched.start, touched.stop
        self.interval = self.slot = self.differed = -1
        self.stored: bytes | None = None


class LineAccesses:
    """What one line of one rank did in one way in a segment: the last access to each place.

    Parameters
    ----------
    rank, site, kind : int
        Which rank, which line, and how.
    needed_from : callable
        Returns the first interval of the rank that is not yet before everything that other ranks still do.

    Attributes
    ----------
    newest : int
        Interval of the last access of all.
    opponents : list of LineAccesses
        Of other ranks in the same segment, if this one or the other writes.
    """

    __slots__ = (
        "_intervals", "_limit", "_needed_from", "_numbers", "entries", "kind", "newest", "number",
        "opponents", "places", "possible", "rank", "site", "writes",
    )  # fmt: skip

    def __init__(
        self, number: int, rank: int, site: int, kind: int, needed_from: Callable[[int], int]
    ) -> None:
        self.number, self.rank, self.site, self.kind = number, rank, site, kind
        self.writes, self.possible = bool(kind & WRITE), bool(kind & POSSIBLE)
        self.newest = -1
        self.opponents: list[LineAccesses] = []
        self.places: dict[object, KeptAccess] = {}
        self.entries: list[KeptAccess] = []
        self._needed_from, self._limit = needed_from, FEW
        self._clear_numbers()

    def _clear_numbers(self) -> None:
        self._intervals = array("q")
        self._numbers = tuple(array("q") for _ in range(4))

    def keep(self, key: object, access: KeptAccess, interval: int, stored: bytes | None) -> None:
        """Keep an access as the last one to its place."""
        if access.slot < 0:
            if len(self.entries) >= self._limit:
                self._forget()
            self.places[key] = access
            self._append(access)
        elif stored != access.stored:
            access.differed = access.interval
        access.interval = self.newest = interval
        access.stored = stored
        self._intervals[access.slot] = interval

    def _append(self, access: KeptAccess) -> None:
        access.slot = len(self.entries)
        self.entries.append(access)
        self._intervals.append(access.interval)
        touched = access.bytes
        row = touched.start, touched.stop, touched.period, touched.run
        for column, value in zip(self._numbers, row, strict=True):
            column.append(value)

    def _forget(self) -> None:
        """Forget the accesses that come before all that other ranks still do."""
        needed = self._needed_from(self.rank)
        entries, self.entries = self.entries, []
        self.places = {key: access for key, access in self.places.items() if access.interval >= needed}
        self._clear_numbers()
        for access in entries:
            if access.interval >= needed:
                self._append(access)
        self._limit = max(FEW, 2 * len(self.entries))

    def near(self, touched: ByteSet, known: int) -> Iterator[KeptAccess]:
        """Yield accesses since an interval that may have bytes in common with others."""
        start, stop = touched.start, touched.stop
        if len(self.entries) > FEW:
            for slot in self._near_slots(touched, known):
                yield self.entries[slot]
            return
        for access in self.entries:
            if access.start < stop and access.stop > start and access.interval >= known:
                yield access

    def _near_slots(self, touched: ByteSet, known: int) -> list[int]:
        starts, stops, periods, runs = map(_as_array, self._numbers)
        mask = (starts < touched.stop) & (stops > touched.start) & (_as_array(self._intervals) >= known)
        slots = np.flatnonzero(mask)
        if touched.period and slots.size > 1:  # many columns of one array lie side by side, like the rows do
            apart = (touched.start - starts[slots]) % touched.period
            gap = (apart >= runs[slots]) & (touched.period - apart >= touched.run)
            slots = slots[~(gap & (periods[slots] == touched.period))]
        return slots.tolist()


def _as_array(numbers: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(numbers, np.int64)
