"""Walk through the accesses of all ranks, and find those that nothing orders.

Of each line of a rank, the last access to each place is enough: if an earlier one is in no order with what
another rank does now, then so is the last one.  What comes before all that other ranks still do is forgotten.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nbparallel.distributed.races.access_log import WRITE, Box, Elements, MemoryAccess
from nbparallel.distributed.races.comparison.byte_sets import ByteSet
from nbparallel.distributed.races.comparison.joined_logs import RankLog
from nbparallel.distributed.races.comparison.kept_accesses import KeptAccess, LineAccesses
from nbparallel.distributed.races.comparison.overlap import Overlap, find_overlap
from nbparallel.distributed.races.comparison.vector_clocks import VectorClocks

MOST_MEETINGS = 16
"""Meetings that are kept of two lines of two ranks."""
MOST_WORK = 300_000
"""Tests of two boxes, of about 5 µs, after which no more are made: seconds."""
ELEMENTS_PER_TEST = 200
"""Elements that are compared in the time of such a test."""
MOST_CONFLICTS = 3_000
"""Conflicts after which the walk ends: a second.  A report shows five races."""
MOST_PAIRS = 2_000_000
"""Accesses beside a line of another rank after which it ends, of about 10 µs: a cell has a thousand lines."""
MOST_REMEMBERED = 50_000
"""Results of tests that are kept for the next time."""


class Meeting(NamedTuple):
    """Two accesses that touch the same bytes, and nothing orders them."""

    first: ByteSet
    second: ByteSet
    overlap: Overlap


_UNKNOWN = Overlap(0, 0)
"""Stands for a test that was not made yet."""
PartOf = Callable[[int, int], int]
"""Of a segment and a byte, the number of the named memory."""


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
    """Some of them, by the identities of their places."""
    is_full: bool = False
    """More meetings would say nothing new."""


class Walk:
    """Compares each access with the last ones of other ranks.

    Parameters
    ----------
    logs : sequence of RankLog
        Of all ranks.
    contended : set of int
        Segments in which there can be a race.
    part_of : callable
        Returns the number of the named memory in which a byte of a segment lies.

    Attributes
    ----------
    conflicts : dict
        Those found.
    incomplete : set of int
        Segments in which not all pairs of places were compared, because there were too many.
    is_cut_short : bool
        Not all accesses were visited, because there were too many conflicts or pairs of lines.
    """

    def __init__(self, logs: Sequence[RankLog], contended: set[int], part_of: PartOf) -> None:
        self.conflicts: dict[tuple[int, int, int], Conflict] = {}
        self.incomplete: set[int] = set()
        self._logs, self._contended, self._part_of = logs, contended, part_of
        self._vectors = VectorClocks([log.events for log in logs])
        self._next = [0] * len(logs)
        self.lines: dict[tuple[int, int, int, int], LineAccesses] = {}
        self._lines_of: defaultdict[int, list[LineAccesses]] = defaultdict(list)
        self._byte_sets: dict[Box | Elements, ByteSet] = {}
        self._overlaps: dict[tuple[int, int], Overlap | None] = {}
        self._work = self._pairs = 0
        self.is_cut_short = False

    def run(self) -> None:
        """Visit all accesses."""
        following = self._next
        for rank, interval in self._vectors.intervals():
            accesses, place = self._logs[rank].accesses, following[rank]
            while place < len(accesses) and accesses[place].interval <= interval:
                if len(self.conflicts) > MOST_CONFLICTS or self._pairs > MOST_PAIRS:
                    self.is_cut_short = True
                    return
                access = accesses[place]
                if access.segment in self._contended:
                    self._visit(rank, access)
                place += 1
            following[rank] = place

    def _visit(self, rank: int, access: MemoryAccess) -> None:
        interval, segment, site, kind, region, stored = access
        line = self.lines.get((rank, segment, site, kind))
        if line is None:
            line = self._add_line(rank, segment, site, kind)
        mine = line.places.get(region)
        if mine is None:
            touched = self._byte_sets.get(region)
            if touched is None:
                touched = self._byte_sets[region] = ByteSet(region)
            mine = KeptAccess(touched)
        clock = self._vectors.clocks[rank]
        for other in line.opponents:
            if other.newest >= clock[other.rank]:
                self._meet(segment, line, mine.bytes, stored, other, clock[other.rank])
        line.keep(region, mine, interval, stored)

    def _add_line(self, rank: int, segment: int, site: int, kind: int) -> LineAccesses:
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
        self._pairs += 1
        first, second = (line, other) if line.number < other.number else (other, line)
        key = first.number, second.number, self._part_of(segment, touched.start)
        conflict = self.conflicts.get(key)
        if conflict is not None and conflict.is_full:
            return
        for access in other.near(touched, known):
            overlap = self._overlap(segment, access.bytes, touched)
            if overlap is None:
                continue
            if conflict is None:
                conflict = self.conflicts[key] = Conflict(first, second, segment)
            conflict.certain |= overlap.certain and not (line.possible or other.possible)
            conflict.harmless = conflict.harmless and _is_same(line, touched, stored, other, access, known)
            places = (touched, access.bytes) if first is line else (access.bytes, touched)
            if len(conflict.meetings) < MOST_MEETINGS:
                conflict.meetings[id(places[0]), id(places[1])] = Meeting(*places, overlap)
            elif not conflict.harmless and (conflict.certain or line.possible or other.possible):
                conflict.is_full = True
                return

    def _overlap(self, segment: int, one: ByteSet, other: ByteSet) -> Overlap | None:
        """Return what two places have in common; a result is remembered, since loops come back to them."""
        if one.is_solid and other.is_solid:
            return find_overlap(one, other)
        key = (id(one), id(other)) if id(one) < id(other) else (id(other), id(one))
        found = self._overlaps.get(key, _UNKNOWN)
        if found is not _UNKNOWN:
            return found
        if self._work > MOST_WORK:
            self.incomplete.add(segment)
            return None
        self._work += 1
        if one.offsets is not None or other.offsets is not None:
            self._work += (one.count + other.count) // ELEMENTS_PER_TEST
        if len(self._overlaps) > MOST_REMEMBERED:
            self._overlaps.clear()
        overlap = self._overlaps[key] = find_overlap(one, other)
        return overlap


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
