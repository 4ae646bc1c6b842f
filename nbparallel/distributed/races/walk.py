"""Walk through the accesses of all ranks, and find those that nothing orders.

Of each line of a rank, the last access to each place is enough: if an earlier one is in no order with what
another rank does now, then so is the last one.  What comes before all that other ranks still do is forgotten.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import add, attrgetter
from typing import NamedTuple

import numpy as np

from nbparallel.distributed.races.access_log import (
    POSSIBLE,
    WRITE,
    AccessLog,
    Acquire,
    Key,
    MemoryAccess,
    Publish,
    Site,
)
from nbparallel.distributed.races.byte_sets import ByteSet, Overlap, find_overlap
from nbparallel.errors import grouped


def join_logs(logs: Iterable[AccessLog]) -> list[AccessLog]:
    """Return the log of each rank, ascending, with what broadcasts have written: not into the root's memory.

    The parts of a rank's log are in order.
    """
    parts = grouped((log.rank, log) for log in logs)
    roots = {
        one.key: (one.access.segment, one.access.region)
        for own in parts.values() for log in own for one in log.broadcasts if one.is_root
    }  # fmt: skip
    joined = []
    for rank, own in sorted(parts.items()):
        whole = AccessLog(
            rank, *(reduce(add, column) for column in zip(*(log[1:] for log in own), strict=True))
        )
        filled = [
            one.access
            for one in whole.broadcasts
            if not one.is_root and roots.get(one.key) != (one.access.segment, one.access.region)
        ]
        accesses = sorted((*whole.accesses, *filled), key=attrgetter("interval"))
        joined.append(whole._replace(accesses=tuple(accesses)))
    return joined


Events = Sequence[Publish | Acquire]
"""Of one rank, in program order."""


class VectorClocks:
    """Passes through the events of all ranks, each after what it depends on.

    Parameters
    ----------
    events : sequence of Events
        Of each rank; below, a rank is its place in this sequence.

    Attributes
    ----------
    clocks : list of lists of int
        Of each rank, in the interval that `intervals` has yielded last for it.
    """

    def __init__(self, events: Sequence[Events]) -> None:
        self.clocks = [[0] * len(events) for _ in events]
        self._events = events
        self._position = [0] * len(events)
        self._nothing = (0,) * len(events)
        self._published: dict[Key, tuple[int, ...]] = {}
        self._joined: dict[tuple[Key, ...], tuple[int, ...]] = {}
        self._expected = {event.key for own in events for event in own if isinstance(event, Publish)}
        self._before_turn = _previous_releases(events, self._expected)
        self._waiting: defaultdict[Key, list[int]] = defaultdict(list)
        self._ready: list[int] = []

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield all intervals, each after those that come before it: the rank, and the interval's number."""
        position = self._position
        for rank in range(len(self._events)):
            yield rank, 0
        self._ready = list(range(len(self._events)))[::-1]
        while self._ready:
            rank = self._ready.pop()
            events = self._events[rank]
            while position[rank] < len(events) and self._apply(rank, events[position[rank]]):
                position[rank] += 1
                yield rank, position[rank]

    def _apply(self, rank: int, event: Publish | Acquire) -> bool:
        """Apply an event; return False if it must wait for another rank, which then makes this one ready."""
        if isinstance(event, Publish):
            snapshot = self.clocks[rank].copy()
            snapshot[rank] = self._position[rank] + 1
            self._published[event.key] = tuple(snapshot)
            self._ready += self._waiting.pop(event.key, ())
            return True
        joined = self._joined.get(event.keys)
        if joined is None:
            for key in event.keys:
                key = self._before_turn.get(key, key)
                if key in self._expected and key not in self._published:
                    self._waiting[key].append(rank)
                    return False
            joined = self._join(event.keys)
        self.clocks[rank][:] = map(max, self.clocks[rank], joined)
        return True

    def _join(self, keys: tuple[Key, ...]) -> tuple[int, ...]:
        """Return what is before a rank that acquires keys, all of which are published or never will be."""
        before = self._before_turn
        found = [self._published.get(before.get(key, key), self._nothing) for key in keys]
        joined = tuple(map(max, self._nothing, *found))
        if len(keys) > 1:  # a collective: its members acquire the same keys
            self._joined[keys] = joined
        return joined


def _previous_releases(events: Sequence[Events], published: set[Key]) -> Mapping[Key, Key]:
    """Return for each turn of a lock the release that it comes after.

    A turn's key is ``("turn", "lock", name, rank, number, time in ns)``, that of its release ``("lock", name,
    rank, number)``.  A turn without a release, of a rank that died, is passed over: what came before it comes
    before the next one, too.
    """
    turns = grouped(
        (key[1:3], (key[5], key, key[1:5]))
        for own in events for event in own if isinstance(event, Acquire)
        for key in event.keys if key[:1] == ("turn",)
    )  # fmt: skip
    before: dict[Key, Key] = {}
    for found in turns.values():
        found.sort(key=lambda turn: turn[0])
        previous: Key | None = None
        for _, key, release in found:
            if previous is not None:
                before[key] = previous
            if release in published:
                previous = release
    return before


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
        "_columns", "_limit", "_needed_from", "kind", "newest", "number", "opponents", "places", "possible",
        "rank", "site", "writes",
    )  # fmt: skip

    def __init__(
        self, number: int, rank: int, site: Site, kind: int, needed_from: Callable[[int], int]
    ) -> None:
        self.number, self.rank, self.site, self.kind = number, rank, site, kind
        self.writes, self.possible = bool(kind & WRITE), bool(kind & POSSIBLE)
        self.newest = -1
        self.opponents: list[LineAccesses] = []
        self._needed_from, self._limit = needed_from, FEW
        self._clear()

    def _clear(self) -> None:
        self.places: dict[object, KeptAccess] = {}
        self._columns = tuple(array("q") for _ in range(5))

    def keep(self, key: object, access: KeptAccess, interval: int, stored: bytes | None) -> None:
        """Keep an access as the last one to its place."""
        if access.slot < 0:
            if len(self.places) >= self._limit:
                self._forget()
            self._append(key, access)
        elif stored != access.stored:
            access.differed = access.interval
        access.interval = self.newest = interval
        access.stored = stored
        self._columns[-1][access.slot] = interval

    def _append(self, key: object, access: KeptAccess) -> None:
        access.slot, touched = len(self.places), access.bytes
        self.places[key] = access
        row = touched.start, touched.stop, touched.period, touched.run, access.interval
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def _forget(self) -> None:
        """Forget the accesses that come before all that other ranks still do."""
        needed = self._needed_from(self.rank)
        kept = [(key, access) for key, access in self.places.items() if access.interval >= needed]
        self._clear()
        for key, access in kept:
            self._append(key, access)
        self._limit = max(FEW, 2 * len(kept))

    def near(self, touched: ByteSet, known: int) -> Iterator[KeptAccess]:
        """Yield accesses since an interval that may have bytes in common with others."""
        start, stop, some = touched.start, touched.stop, self.places.values()
        if len(some) > FEW:
            slots = self._near_slots(touched, known)
            kept = list(some) if slots else []
            yield from (kept[slot] for slot in slots)
            return
        for access in some:
            if access.start < stop and access.stop > start and access.interval >= known:
                yield access

    def _near_slots(self, touched: ByteSet, known: int) -> list[int]:
        columns = (np.frombuffer(column, np.int64) for column in self._columns)
        starts, stops, periods, runs, intervals = columns
        slots = np.flatnonzero((starts < touched.stop) & (stops > touched.start) & (intervals >= known))
        if touched.period and slots.size > 1:  # many columns of one array lie side by side, like the rows do
            apart = (touched.start - starts[slots]) % touched.period
            gap = (apart >= runs[slots]) & (touched.period - apart >= touched.run)
            slots = slots[~(gap & (periods[slots] == touched.period))]
        return slots.tolist()


MOST_MEETINGS = 16
"""Meetings that are kept of two lines of two ranks."""
MOST_WORK = 1_000_000
"""Accesses beside a line of another rank, and tests of two places, of 5 to 10 µs; then the walk ends."""
ELEMENTS_PER_TEST = 200
"""Elements that are compared in the time of such a test."""
MOST_CONFLICTS = 3_000
"""Conflicts after which it ends: a second.  A report shows five races."""


class Meeting(NamedTuple):
    """Two accesses that touch the same bytes, and nothing orders them."""

    first: ByteSet
    second: ByteSet
    overlap: Overlap


@dataclass(slots=True)
class Conflict:
    """What a line of one rank and a line of another have done without an order."""

    first: LineAccesses
    second: LineAccesses
    segment: int
    certain: bool = False
    """At least once both accesses and what they have in common are known exactly."""
    harmless: bool = True
    """Each time both have stored the same value."""
    meetings: dict[tuple[int, int], Meeting] = field(default_factory=dict)
    """The first `MOST_MEETINGS`, by the identities of their places."""

    @property
    def is_known(self) -> bool:
        """Whether more meetings would say nothing new."""
        possible = self.first.possible or self.second.possible
        return len(self.meetings) >= MOST_MEETINGS and not self.harmless and (self.certain or possible)


class Walk:
    """Compares each access with the last ones of other ranks.

    Parameters
    ----------
    logs : sequence of AccessLog
        Of all ranks.
    part_of : callable
        Returns the number of the named memory in which a byte of a segment lies.

    Attributes
    ----------
    conflicts : dict
        Those found.
    """

    def __init__(self, logs: Sequence[AccessLog], part_of: Callable[[int, int], int]) -> None:
        self.conflicts: dict[tuple[int, int, int], Conflict] = {}
        self._logs, self._part_of = logs, part_of
        self._vectors = VectorClocks([log.events for log in logs])
        self._next = [0] * len(logs)
        self.lines: dict[tuple[int, int, Site, int], LineAccesses] = {}
        self._lines_of: defaultdict[int, list[LineAccesses]] = defaultdict(list)
        self._byte_set = cache(ByteSet)
        self._compared = cache(self._compare)  # loops come back to the same places
        self._work = 0

    def run(self) -> None:
        """Visit all accesses."""
        following = self._next
        for rank, interval in self._vectors.intervals():
            accesses = self._logs[rank].accesses
            while following[rank] < len(accesses) and accesses[following[rank]].interval <= interval:
                if len(self.conflicts) > MOST_CONFLICTS or self._work > MOST_WORK:
                    return
                self._visit(rank, accesses[following[rank]])
                following[rank] += 1

    @property
    def is_cut_short(self) -> bool:
        """Whether not all accesses were visited, because there were too many."""
        return any(count < len(log.accesses) for count, log in zip(self._next, self._logs, strict=True))

    def _visit(self, rank: int, access: MemoryAccess) -> None:
        interval, segment, site, kind, region, stored = access
        line = self.lines.get((rank, segment, site, kind))
        if line is None:
            line = self._add_line(rank, segment, site, kind)
        mine = line.places.get(region)
        if mine is None:
            mine = KeptAccess(self._byte_set(region))
        clock = self._vectors.clocks[rank]
        for other in line.opponents:
            if other.newest >= clock[other.rank]:
                self._meet(segment, line, mine.bytes, stored, other, clock[other.rank])
        line.keep(region, mine, interval, stored)

    def _add_line(self, rank: int, segment: int, site: Site, kind: int) -> LineAccesses:
        line = LineAccesses(len(self.lines), rank, site, kind, self._needed_from)
        self.lines[rank, segment, site, kind] = line
        for other in self._lines_of[segment]:
            if other.rank != rank and (other.writes or line.writes):
                line.opponents.append(other)
                other.opponents.append(line)
        self._lines_of[segment].append(line)
        return line

    def _needed_from(self, rank: int) -> int:
        """Return the first interval of a rank that is not before everything that others still do."""
        counts = [
            self._vectors.clocks[other][rank]
            for other, log in enumerate(self._logs)
            if other != rank and self._next[other] < len(log.accesses)
        ]
        return min(counts, default=sys.maxsize)

    def _meet(
        self,
        segment: int,
        line: LineAccesses,
        touched: ByteSet,
        stored: bytes | None,
        other: LineAccesses,
        known: int,
    ) -> None:
        """Compare an access with what another rank's line has done since an interval."""
        self._work += 1
        first, second = (line, other) if line.number < other.number else (other, line)
        key = first.number, second.number, self._part_of(segment, touched.start)
        conflict = self.conflicts.get(key)
        if conflict is not None and conflict.is_known:
            return
        for access in other.near(touched, known):
            overlap = self._overlap(access.bytes, touched)
            if overlap is None:
                continue
            if conflict is None:
                conflict = self.conflicts[key] = Conflict(first, second, segment)
            conflict.certain |= overlap.certain and not (line.possible or other.possible)
            conflict.harmless = conflict.harmless and _is_same(line, touched, stored, other, access, known)
            places = (touched, access.bytes) if first is line else (access.bytes, touched)
            if len(conflict.meetings) < MOST_MEETINGS:
                conflict.meetings[id(places[0]), id(places[1])] = Meeting(*places, overlap)
            elif conflict.is_known:
                return

    def _overlap(self, one: ByteSet, other: ByteSet) -> Overlap | None:
        """Return what two places have in common."""
        if one.is_solid and other.is_solid:
            return find_overlap(one, other)
        return self._compared(*sorted((one, other), key=id))

    def _compare(self, one: ByteSet, other: ByteSet) -> Overlap | None:
        elements = [side.offsets.size for side in (one, other) if side.offsets is not None]
        self._work += 1 + sum(elements) // ELEMENTS_PER_TEST
        return find_overlap(one, other)


def _is_same(
    line: LineAccesses,
    touched: ByteSet,
    stored: bytes | None,
    other: LineAccesses,
    access: KeptAccess,
    known: int,
) -> bool:
    """Return whether two ranks store the same value on one line: the result is the same in any order."""
    if not (line.site == other.site and line.kind == other.kind == WRITE):
        return False
    size = touched.region.itemsize
    aligned = size == access.bytes.region.itemsize and (touched.start - access.start) % size == 0
    return aligned and stored is not None and stored == access.stored and access.differed < known
