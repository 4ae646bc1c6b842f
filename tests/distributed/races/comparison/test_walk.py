"""The walk finds the pairs of lines that a look at all pairs of accesses finds, and no others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbparallel.distributed.races import walk
from nbparallel.distributed.races.access_log import (
    POSSIBLE,
    READ,
    WRITE,
    AccessLog,
    Acquire,
    Box,
    Elements,
    MemoryAccess,
    Publish,
    Site,
)
from nbparallel.distributed.races.report import compare
from nbparallel.distributed.races.walk import VectorClocks, Walk, join_logs
from tests.distributed.races.comparison.recorded import bytes_of, elements
from tests.harness.tiers import examples

Line = tuple[int, int, Site, int]
"""Rank, segment, site, kind."""
SITES = tuple(Site("", line) for line in (1, 2, 3))
REGIONS: list[Box | Elements] = [
    *(Box(8 * first, (count,), (8,), 8) for first, count in ((0, 1), (1, 1), (0, 4), (2, 4), (5, 3))),
    *(Box(8 * first, (4,), (16,), 8) for first in (0, 1)),
    *(Box(8 * first, (3,), (24,), 8) for first in (0, 1)),
    elements(8, [0, 24, 56]), elements(8, [8, 16]), elements(4, [4, 60]),
]  # fmt: skip


@st.composite
def cells(draw: st.DrawFn) -> list[AccessLog]:
    """Draw what ranks do, one after the other: so what is acquired was published before."""
    ranks = draw(st.integers(2, 4))
    events: list[list[Publish | Acquire]] = [[] for _ in range(ranks)]
    accesses: list[list[MemoryAccess]] = [[] for _ in range(ranks)]
    keys: list[tuple[str, int]] = [("never published", 0)]
    for number in range(draw(st.integers(0, 30))):
        rank = draw(st.integers(0, ranks - 1))
        what = draw(st.sampled_from(["access", "access", "publish", "acquire", "barrier"]))
        if what == "access":
            kind = draw(st.sampled_from([READ, WRITE, READ | WRITE, WRITE | POSSIBLE]))
            accesses[rank].append(
                MemoryAccess(
                    len(events[rank]), draw(st.integers(1, 2)), draw(st.sampled_from(SITES)), kind,
                    draw(st.sampled_from(REGIONS)), draw(st.sampled_from([None, b"1", b"2"])),
                )
            )  # fmt: skip
        elif what == "publish":
            keys.append(("key", number))
            events[rank].append(Publish(keys[-1]))
        elif what == "acquire":
            events[rank].append(Acquire(tuple(draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)))))
        else:
            members = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
            barrier = tuple(("barrier", number, member) for member in members)
            for member, key in zip(members, barrier, strict=True):
                events[member] += [Publish(key), Acquire(barrier)]
    return [
        AccessLog(rank, tuple(events[rank]), tuple(accesses[rank]), (), len(accesses[rank]))
        for rank in draw(st.permutations(range(ranks)))
    ]


def ordered(logs: Iterable[AccessLog]) -> set[tuple[int, int, int, int]]:
    """Return which publishing event is before which acquiring one, by trying all ways between events."""
    by_rank = {log.rank: log.events for log in logs}
    nodes = [(rank, index) for rank, events in by_rank.items() for index in range(len(events))]
    publishers = {by_rank[r][i].key: (r, i) for r, i in nodes if isinstance(by_rank[r][i], Publish)}
    before: dict[tuple[int, int], set[tuple[int, int]]] = {node: set() for node in nodes}
    changed = True
    while changed:
        changed = False
        for rank, index in nodes:
            event = by_rank[rank][index]
            causes = {(rank, index - 1)} if index else set()
            if isinstance(event, Acquire):
                causes |= {publishers[key] for key in event.keys if key in publishers}
            new = causes.union(*(before[cause] for cause in causes)) - before[rank, index]
            before[rank, index] |= new
            changed |= bool(new)
    return {
        (*cause, *node)
        for node in nodes
        for cause in before[node]
        if isinstance(by_rank[node[0]][node[1]], Acquire) and isinstance(by_rank[cause[0]][cause[1]], Publish)
    }


def happens_before(order: set[tuple[int, int, int, int]], first: int, i: int, second: int, j: int) -> bool:
    """Tell whether what a rank does in an interval is before what another one does in an interval."""
    return any(a == first and b == second and p >= i and q < j for a, p, b, q in order)


def all_pairs(logs: list[AccessLog]) -> tuple[dict[frozenset[Line], bool], dict[frozenset[Line], bool]]:
    """Return the lines in a race, each with whether it is certain; and each with whether it is harmless."""
    order = ordered(logs)
    certain: dict[frozenset[Line], bool] = {}
    harmless: dict[frozenset[Line], bool] = {}
    for one in logs:
        for other in logs:
            if one.rank >= other.rank:
                continue
            for a in one.accesses:
                for b in other.accesses:
                    if a.segment != b.segment or not (a.kind | b.kind) & WRITE:
                        continue
                    if not bytes_of(a.region) & bytes_of(b.region):
                        continue
                    if happens_before(order, one.rank, a.interval, other.rank, b.interval):
                        continue
                    if happens_before(order, other.rank, b.interval, one.rank, a.interval):
                        continue
                    lines = frozenset(
                        (rank, x.segment, x.site, x.kind) for rank, x in ((one.rank, a), (other.rank, b))
                    )
                    certain[lines] = certain.get(lines, False) or not (a.kind | b.kind) & POSSIBLE
                    harmless[lines] = harmless.get(lines, True) and _is_same(a, b)
    return certain, harmless


def _is_same(a: MemoryAccess, b: MemoryAccess) -> bool:
    same = a.site == b.site and a.kind == b.kind == WRITE and a.stored == b.stored is not None
    return same and a.region.itemsize == b.region.itemsize


def found_by_walk(logs: list[AccessLog]) -> tuple[dict[frozenset[Line], bool], dict[frozenset[Line], bool]]:
    """Return the same, as the walk finds it."""
    joined = join_logs(logs)
    found = Walk(joined, lambda segment, byte: 0)
    found.run()
    certain, harmless = {}, {}
    for conflict in found.conflicts.values():
        sides = conflict.first, conflict.second
        lines = frozenset((joined[line.rank].rank, conflict.segment, line.site, line.kind) for line in sides)
        certain[lines], harmless[lines] = conflict.certain, conflict.harmless
        for meeting in conflict.meetings.values():
            assert bytes_of(meeting.first.region) & bytes_of(meeting.second.region)
    return certain, harmless


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(cells())
def test_as_all_pairs(logs: list[AccessLog]) -> None:
    """With the same certainty, and harmless only if each pair stores the same."""
    assert found_by_walk(logs) == all_pairs(logs)


@settings(max_examples=examples(300), deadline=None)
@given(cells())
def test_forgetting_and_many_places_change_nothing(logs: list[AccessLog]) -> None:
    """So it is if accesses are forgotten soon, and looked through with numpy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "FEW", 1)
        assert found_by_walk(logs) == all_pairs(logs)


@settings(max_examples=examples(300), deadline=None)
@given(cells())
def test_a_full_conflict_hides_no_other(logs: list[AccessLog]) -> None:
    """Of each pair of lines some meetings are enough; no pair is lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "MOST_MEETINGS", 1)
        certain, harmless = found_by_walk(logs)
    assert (certain, harmless) == all_pairs(logs)


@settings(max_examples=examples(300), deadline=None)
@given(cells(), st.data())
def test_parts_of_a_log(logs: list[AccessLog], data: st.DataObject) -> None:
    """A log that came in parts, one after the other, is the same log."""
    parts = []
    for log in logs:
        cut = data.draw(st.integers(0, len(log.events)))
        early = tuple(access for access in log.accesses if access.interval < cut)
        late = tuple(access for access in log.accesses if access.interval >= cut)
        parts += [AccessLog(log.rank, log.events[:cut], early), AccessLog(log.rank, log.events[cut:], late)]
    assert found_by_walk(parts) == all_pairs(logs)


@settings(max_examples=examples(300), deadline=None)
@given(cells())
def test_clocks_hold_what_is_before(logs: list[AccessLog]) -> None:
    """Each interval comes once, after all that is before it; its clock counts just those."""
    by_rank = sorted(logs, key=lambda log: log.rank)
    order = ordered(by_rank)
    clocks = VectorClocks([log.events for log in by_rank])
    seen: set[tuple[int, int]] = set()
    for rank, interval in clocks.intervals():
        assert (rank, interval) not in seen
        seen.add((rank, interval))
        for other, count in enumerate(clocks.clocks[rank]):
            if other == rank:
                continue
            for i in range(len(by_rank[other].events) + 1):
                assert (i < count) == happens_before(order, other, i, rank, interval)
                assert i >= count or (other, i) in seen
    assert seen == {(log.rank, i) for log in by_rank for i in range(len(log.events) + 1)}


def lock_events(*turns: tuple[int, int, bool]) -> list[list[Publish | Acquire]]:
    """Return events of turns of a lock: rank, time, and whether it was released."""
    events: list[list[Publish | Acquire]] = [[], [], []]
    for rank, time_ns, released in turns:
        number = 1 + sum(isinstance(event, Acquire) for event in events[rank])
        events[rank].append(Acquire((("turn", "lock", "x", rank, number, time_ns),)))
        if released:
            events[rank].append(Publish(("lock", "x", rank, number)))
    return events


def last_clock(events: Any, rank: int) -> list[int]:
    """Return the clock of a rank after its last event."""
    clocks = VectorClocks(events)
    for _ in clocks.intervals():
        pass
    return clocks.clocks[rank]


def test_turns_of_a_lock() -> None:
    """A turn comes after the release of the turn before it, by time; not after a later one."""
    events = lock_events((1, 20, True), (0, 30, True), (2, 10, True))
    assert last_clock(events, 0)[1:] == [2, 2]
    assert last_clock(events, 1)[0] == 0
    assert last_clock(events, 1)[2] == 2
    assert last_clock(events, 2)[:2] == [0, 0]


def test_a_turn_that_never_ended() -> None:
    """A rank that died with the lock orders nothing; what was released before it still does."""
    events = lock_events((0, 10, True), (1, 20, False), (2, 30, True))
    assert last_clock(events, 2)[:2] == [2, 0]


def test_a_lock_of_an_earlier_cell() -> None:
    """The first turn comes after the release of what was acquired before the cell."""
    events: list[list[Publish | Acquire]] = [[Publish(("lock", "x", 0, 0))], *lock_events((1, 5, True))[1:]]
    assert last_clock(events, 1)[0] == 1


def test_other_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places at a distance of 16 bytes and of 24 meet at every 48th."""
    monkeypatch.setattr(walk, "FEW", 1)
    other = [MemoryAccess(0, 1, SITES[0], WRITE, Box(8 * first, (3,), (24,), 8)) for first in (1, 5)]
    logs = [_log(0, other), _log(1, [MemoryAccess(0, 1, SITES[0], WRITE, Box(0, (4,), (16,), 8))])]
    assert found_by_walk(logs) == all_pairs(logs)
    assert len(found_by_walk(logs)[0]) == 1


def test_many_same_numbers_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """After many places at which both store the same, one at which they do not is still found."""
    monkeypatch.setattr(walk, "MOST_MEETINGS", 2)
    logs = [
        _log(
            rank,
            [
                MemoryAccess(
                    0, 1, SITES[0], WRITE, Box(8 * i, (1,), (8,), 8), b"%d" % (rank if i == 9 else 5)
                )
                for i in range(10)
            ],
        )
        for rank in (0, 1)
    ]
    _, harmless = found_by_walk(logs)
    assert list(harmless.values()) == [False]


class Comparisons:
    """Counts how often two places are compared."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, find = 0, walk.find_overlap

        def counted(*places: Any) -> Any:
            self.count += 1
            return find(*places)

        patch.setattr(walk, "find_overlap", counted)


def _log(rank: int, accesses: list[MemoryAccess], events: Iterable[Publish | Acquire] = ()) -> AccessLog:
    return AccessLog(rank, tuple(events), tuple(accesses), (), len(accesses))


@pytest.mark.parametrize("shape", ["rows", "columns", "tiles"])
def test_own_parts_are_not_compared_pair_by_pair(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of places beside each other, without any order between the ranks: few pairs are looked at."""
    count = 2_000
    comparisons = Comparisons(monkeypatch)

    def place(number: int) -> Box:
        if shape == "rows":
            return Box(number * 800, (100,), (8,), 8)
        if shape == "columns":
            return Box(number * 8, (100,), (8 * 2 * count,), 8)
        row, column = divmod(number, 100)
        return Box(row * 10 * 8_000 + column * 80, (10, 10), (8_000, 8), 8)

    logs = [
        _log(rank, [MemoryAccess(0, 1, SITES[0], WRITE, place(2 * number + rank)) for number in range(count)])
        for rank in (0, 1)
    ]
    assert found_by_walk(logs) == ({}, {})
    assert comparisons.count <= 4 * count


def test_racing_lines_are_not_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once two lines of two ranks are known to race, their other places are passed over."""
    comparisons = Comparisons(monkeypatch)
    logs = [
        _log(
            rank,
            [MemoryAccess(0, 1, SITES[0], WRITE, Box(8 * i, (2_000 - i,), (8,), 8)) for i in range(1_500)],
        )
        for rank in (0, 1)
    ]
    certain, _ = found_by_walk(logs)
    assert list(certain.values()) == [True]
    assert comparisons.count <= 2 * walk.MOST_MEETINGS


def test_barriers_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that differ in each step are compared with those of their step only."""
    comparisons = Comparisons(monkeypatch)
    rng, steps = np.random.default_rng(0), 1_000
    places = [elements(8, 8 * rng.choice(1_000, 20)) for _ in range(steps)]
    logs = []
    for rank in (0, 1):
        events: list[Publish | Acquire] = []
        accesses = []
        for step, place in enumerate(places):
            if step % 2 == rank:
                accesses.append(MemoryAccess(len(events), 1, SITES[0], WRITE, place))
            keys = tuple(("collective", step, member) for member in (0, 1))
            events += [Publish(keys[rank]), Acquire(keys)]
        logs.append(_log(rank, accesses, events))
    joined = join_logs(logs)
    found = Walk(joined, lambda segment, byte: 0)
    found.run()
    assert not found.conflicts
    assert comparisons.count == 0
    assert all(len(line.entries) <= 2 * walk.FEW for line in found.lines.values())


def test_too_many_irregular_places_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that would take minutes ends, and says so."""
    monkeypatch.setattr(walk, "MOST_WORK", 20)
    logs = [
        _log(
            rank,
            [
                MemoryAccess(0, 7, SITES[0], WRITE, elements(8, [16 * i + 8 * rank, 9_600 + 8 * rank]))
                for i in range(30)
            ],
        )
        for rank in (0, 1)
    ]
    assert compare(logs).not_checked == ("the rest of the cell, because too many accesses are in no order",)


@pytest.mark.parametrize("bound", ["MOST_CONFLICTS", "MOST_WORK"])
def test_too_many_lines_are_said(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of lines that all race are thousands of pairs: the search ends, and says so."""
    monkeypatch.setattr(walk, bound, 100)
    accesses = tuple(
        MemoryAccess(0, 1, Site("", number + 1), WRITE, Box(8, (4,), (8,), 8)) for number in range(50)
    )
    report = compare(AccessLog(rank, (), accesses) for rank in (0, 1))
    assert 0 < len(report.races) <= 150
    assert report.not_checked == ("the rest of the cell, because too many accesses are in no order",)
