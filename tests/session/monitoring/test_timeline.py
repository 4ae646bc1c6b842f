"""The notes of all ranks side by side: no gap, and who came last is whom the others waited for."""

from __future__ import annotations

import json

from nbparallel.session.monitoring.timeline import (
    COMPUTING,
    MOVING,
    WAITING,
    Timeline,
    build_timeline,
    chrome_trace,
)
from nbparallel.session.results import CellRecord
from nbparallel.wire.messages import Noted, RankTimeline

MS = 1_000_000
START = 10_000_000_000


def operation(name: str, begin: int, end: int, *, wait: int = 0, peer: int = -1, awaited: int = -1,
              number: int = 0, failed: bool = False) -> Noted:  # fmt: skip
    """Return an operation on line 2, times in milliseconds since the cell's start."""
    return (
        name, 2, START + begin * MS, START + end * MS, wait * MS, 80, peer, awaited, number, (), failed
    )  # fmt: skip


def notes(rank: int, *noted: Noted, ended: int = 100, noted_from: int = 0) -> RankTimeline:
    """Return what a rank noted of a cell that reached it after 2 ms; its first statement began after 5."""
    waited, whole = sum(span[4] for span in noted), sum(span[3] - span[2] for span in noted)
    return RankTimeline(
        rank, 4000 + rank, START + 2 * MS, START + ended * MS, noted_from_ns=START + (noted_from or 2) * MS,
        operations=len(noted) + bool(noted_from), omitted=int(bool(noted_from)), wait_ns=waited,
        moving_ns=whole - waited, noted=noted, statements=((2, START + 5 * MS),),
    )  # fmt: skip


def timeline(*ranks: RankTimeline, died: dict[int, str] | None = None) -> Timeline:
    """Lay them side by side."""
    source = ("", "total = all_reduce(x)")
    found = {notes.rank: notes for notes in ranks}
    return build_timeline(CellRecord(3, source, found, died or {}, 1, START))


def shape(found: Timeline, rank: int) -> list[tuple[str, int, int, int]]:
    """Return a rank's spans: kind, begin and end in milliseconds, who was waited for."""
    spans = found.rows[rank].spans
    return [(s.kind, round(s.begin * 1000), round(s.end * 1000), s.waits_for) for s in spans]


def test_a_rank_that_never_came_was_waited_for() -> None:
    """Not the last one that did, whether the missing one finished, failed elsewhere, or died."""
    early = notes(0, operation("all_reduce", 10, 60, wait=50, awaited=1, number=1, failed=True))
    late = notes(1, operation("all_reduce", 50, 60, wait=9, awaited=2, number=1, failed=True))
    for found in (timeline(early, late, notes(2)), timeline(early, late, died={2: "was killed"})):
        assert [(wait.rank, wait.waits_for) for wait in found.waits()] == [(0, 2), (1, 2)]
    unknown = notes(2, noted_from=40)  # it may have been there: its short operations are only counted
    assert timeline(early, late, unknown).waits()[0].waits_for == 1


def test_who_came_last_was_waited_for() -> None:
    """In a collective all wait for its last member, each as long as it says; also who did not notice it."""
    found = timeline(
        notes(0, operation("all_reduce", 10, 60, wait=5, number=1)),
        notes(1, operation("all_reduce", 50, 60, number=1)),
        notes(2, operation("all_reduce", 20, 60, wait=33, awaited=0, number=1)),
    )
    assert shape(found, 0) == [
        ("computing", 0, 10, -1), ("waiting", 10, 15, 1), ("moving", 15, 60, 1), ("computing", 60, 100, -1)
    ]  # fmt: skip
    assert shape(found, 1) == [("computing", 0, 50, -1), ("moving", 50, 60, -1), ("computing", 60, 100, -1)]
    assert shape(found, 2)[1] == ("waiting", 20, 53, 1)
    waits = [(wait.rank, wait.waits_for, round(wait.seconds, 3)) for wait in found.waits()]
    assert waits == [(2, 1, 0.033), (0, 1, 0.005)]
    assert found.text_of(2) == "total = all_reduce(x)"
    assert found.text_of(0) == found.text_of(9) == ""


def test_a_receiver_waits_for_its_source() -> None:
    """A message has no number: who was asked for is who was waited for."""
    found = timeline(notes(0, operation("recv", 10, 40, wait=20, peer=1)), notes(1))
    assert shape(found, 0)[1:3] == [("waiting", 10, 30, 1), ("moving", 30, 40, 1)]


def test_there_are_no_gaps() -> None:
    """A row is whole from the cell's beginning to its end; what was not noted is said to be."""
    found = timeline(
        notes(0, operation("barrier", 50, 52), operation("barrier", 52, 90), noted_from=50), notes(1)
    )
    assert shape(found, 0)[:2] == [("computing", 0, 2, -1), ("not noted", 2, 50, -1)]
    for row in found.rows:
        edges = [0.0, *(span.end for span in row.spans)]
        assert [span.begin for span in row.spans] == edges[:-1]
        assert edges[-1] == row.ended == found.seconds


def test_sums_are_those_of_the_counters() -> None:
    """What was not noted one by one is in the sums: the rank's whole time, in three parts."""
    counted = RankTimeline(
        0, 4000, START + 2 * MS, START + 100 * MS, noted_from_ns=START + 2 * MS, operations=801, omitted=800,
        wait_ns=50 * MS, moving_ns=7 * MS, noted=(operation("barrier", 10, 20, wait=3),), statements=(),
    )  # fmt: skip
    (row,) = timeline(counted).rows
    assert [round(row.total(kind) * 1000) for kind in (COMPUTING, WAITING, MOVING)] == [43, 50, 7]
    assert row.operations == 801


def test_a_dead_rank_has_a_row() -> None:
    """Of a rank that died there is how it ended."""
    found = timeline(notes(0), notes(2), died={1: "was killed by SIGKILL"})
    assert [row.rank for row in found.rows] == [0, 1, 2]
    assert (found.rows[1].died, found.rows[1].spans) == ("was killed by SIGKILL", ())


def test_trace_events() -> None:
    """The file has what Perfetto needs: names, and complete events in microseconds that lie in each other."""
    found = timeline(
        notes(0, operation("all_reduce", 10, 60, wait=40, number=1)),
        notes(2, operation("all_reduce", 50, 60, number=1)),
        died={1: "was killed by SIGKILL"},
    )
    made = json.loads(json.dumps(chrome_trace(found)))
    events = made["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {"rank 0", "rank 1 (was killed by SIGKILL)", "rank 2"}
    complete = [e for e in events if e["ph"] == "X"]
    assert all(e["pid"] in names and e["tid"] == e["pid"] for e in events)
    mine = {e["cat"]: e for e in complete if names[e["pid"]] == "rank 0"}
    assert (mine["statement"]["ts"], mine["statement"]["dur"]) == (5000, 95000)
    assert mine["statement"]["name"] == "line 2: total = all_reduce(x)"
    assert (mine["waiting"]["name"], mine["waiting"]["dur"]) == ("all_reduce: waits for rank 2", 40000)
    assert (mine["operation"]["ts"], mine["operation"]["dur"]) == (50000, 10000)
    assert mine["operation"]["args"] == {"line": 2, "bytes": 80, "peer": -1}
