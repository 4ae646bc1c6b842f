"""Timeline: what each rank did when in one cell: computing, waiting for which rank, moving data.

Ranks note their operations (`distributed.tracing`); this module combines the notes of all.  A rank knows how
long it waited in an operation, but not always for which rank: in a collective that is the last one, or the
one that never came, which only the notes of all members show.  Sums are not those of the spans but of the
ranks' counters (`session.tasks.outcomes`): short operations are counted without being noted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbparallel.session.processes.launch import usable_cpus
from nbparallel.session.results import CellRecord, RankTimes
from nbparallel.session.tasks.outcomes import times_of
from nbparallel.wire.messages import OperationSpan, RankTimeline

COMPUTING, WAITING, MOVING, UNKNOWN = "computing", "waiting", "moving", "not noted"
"""Kinds of a `Span`; of what ran before an `UNKNOWN` one ended, operations are only counted."""
_OF_TWO = ("send", "recv", "isend", "irecv")

_Met = tuple[tuple[int, ...], int]
"""Group and number: one collective."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of one rank's time."""

    kind: str
    """``computing``, ``waiting``, ``moving`` or ``not noted``."""
    begin: float
    """Seconds since the cell began."""
    end: float
    """Likewise."""
    operation: str = ""
    """The operation between ranks that it belongs to; empty when computing."""
    line: int = 0
    """The line of the cell; 0 unknown."""
    nbytes: int = 0
    """Bytes that the operation moved or reduced."""
    peer: int = -1
    """The root of the operation, or the rank that was sent to or received from; -1 none, or any."""
    waits_for: int = -1
    """The rank that was waited for (in a collective one that never came, or the last to come); -1 unknown."""
    failed: bool = False
    """Whether the operation raised."""

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank's time in a cell."""

    rank: int
    """Its number."""
    pid: int
    """Its process; 0 unknown."""
    began: float
    """When its first statement began, in seconds since the cell began."""
    ended: float
    """When it had ended the cell."""
    spans: tuple[Span, ...]
    """In order, from the cell's beginning to `ended`, without gaps."""
    statements: tuple[tuple[int, float], ...]
    """Line and beginning of each statement of the cell."""
    operations: int
    """Operations in all."""
    omitted: int
    """Operations that were only counted."""
    died: str = ""
    """How its process ended, if it did: then there are no spans."""
    times: RankTimes | None = None
    """Where its time has gone, with what was not noted; None: what the spans show."""
    host: str = ""
    """The name of its host; empty: this machine."""

    def total(self, kind: str) -> float:
        """Return the seconds of a kind: computing, waiting and moving are the whole time together."""
        times = self.times
        if times is None or kind == UNKNOWN:
            return sum(span.seconds for span in self.spans if span.kind == kind)
        of_kind = {COMPUTING: times.computing_ns, WAITING: times.waiting_ns, MOVING: times.moving_ns}
        return of_kind[kind] / 1e9

    def between(self) -> dict[str, float]:
        """Return the share of each kind in the time between the operations that were noted.

        Others may have been only counted there: how long these waited and moved data in all is known.
        """
        seconds = dict.fromkeys((COMPUTING, WAITING, MOVING, UNKNOWN), 0.0)
        for span in self.spans:
            seconds[span.kind] += span.seconds
        between, shares = seconds[COMPUTING], {}
        if self.omitted and between:
            shares = {k: max(0.0, self.total(k) - seconds[k]) / between for k in (WAITING, MOVING)}
        return {COMPUTING: max(0.0, 1.0 - sum(shares.values())), **shares}


@dataclass(frozen=True, slots=True)
class OperationWait:
    """All time that one rank waited for another one in one line."""

    rank: int
    """The rank that waited."""
    waits_for: int
    """The rank that it waited for; -1 unknown."""
    operation: str
    """The operation."""
    line: int
    """The line of the cell; 0 unknown."""
    seconds: float
    """Seconds in all."""
    count: int
    """Number of waits."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One cell on all ranks that took part."""

    number: int
    """The notebook's ``In[n]``; 0 if it was no cell."""
    seconds: float
    """From when the notebook sent the cell to the last rank's end."""
    rows: tuple[RankRow, ...]
    """In rank order."""
    source: tuple[str, ...]
    """The cell's lines, line 1 first, as the gutter counts them."""
    cpus: int = 0
    """CPUs that the ranks may use; 0: unknown."""
    cpu_seconds: float = 0.0
    """Processor time of all ranks."""
    private_nbytes: int = 0
    """Bytes of large arrays of their own that all ranks have passed to reductions."""
    copied: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes of large objects that were copied for the cell, by name, and for how many cells in a row."""
    begin: float = 0.0
    """Seconds of the cell before this part of it, from which the times here count."""
    clock_error: float | None = 0.0
    """Seconds within which the clocks of all hosts agree; 0: there is one; None: they were not compared."""

    def part(self, begin: float, end: float) -> Timeline:
        """Return what happened from `begin` to `end`: its sums are those of the spans, which are cut.

        Operations that were only counted are computing there.
        """
        end = min(end, self.seconds)
        rows = tuple(
            replace(
                row,
                spans=tuple(
                    replace(span, begin=max(span.begin, begin) - begin, end=min(span.end, end) - begin)
                    for span in row.spans
                    if span.end > begin and span.begin < end
                ),
                times=None,
                operations=sum(
                    span.end > begin and span.begin < end and span.kind != WAITING and bool(span.operation)
                    for span in row.spans
                ),
            )
            for row in self.rows
        )
        return replace(  # how much processor time a part took, and which arrays it moved, is not known
            self,
            seconds=end - begin,
            rows=rows,
            begin=begin,
            cpus=0,
            cpu_seconds=0.0,
            private_nbytes=0,
            copied={},
        )

    def text_of(self, line: int) -> str:
        """Return a line of the cell, or an empty string."""
        return self.source[line - 1].strip() if 0 < line <= len(self.source) else ""

    def waits(self) -> tuple[OperationWait, ...]:
        """Return which rank waited for which, in which line; the longest first."""
        found: dict[tuple[int, int, str, int], tuple[float, int]] = {}
        for row in self.rows:
            for span in row.spans:
                if span.kind == WAITING:
                    key = (row.rank, span.waits_for, span.operation, span.line)
                    seconds, count = found.get(key, (0.0, 0))
                    found[key] = (seconds + span.seconds, count + 1)
        waits = [OperationWait(*key, seconds, count) for key, (seconds, count) in found.items()]
        return tuple(sorted(waits, key=lambda wait: -wait.seconds))


def build_timeline(record: CellRecord) -> Timeline:
    """Combine the notes of all ranks."""
    zero = record.began_ns or min((notes.began_ns for notes in record.ranks.values()), default=0)
    spans = awaited_spans(record)
    rows = [_row(notes, spans[rank], zero) for rank, notes in record.ranks.items()]
    ends = [times.finished_ns / 1e9 for times in record.times.values()]
    end = max([row.ended for row in rows] + ends, default=0.0)
    rows += [
        RankRow(rank, 0, 0.0, end, (), (), 0, 0, how, record.times.get(rank))
        for rank, how in record.died.items()
    ]
    private = sum(notes.private_nbytes for notes in record.ranks.values())
    rows.sort(key=lambda row: row.rank)
    return Timeline(
        record.number,
        end,
        tuple(rows),
        record.source,
        usable_cpus(),
        record.cpu_ns / 1e9,
        private,
        record.copied,
    )


def awaited_spans(record: CellRecord) -> dict[int, list[OperationSpan]]:
    """Return the operations of each rank with the rank that each waited for, as far as notes show."""
    spans = {rank: notes.spans() for rank, notes in record.ranks.items()}
    last, absent = _last_to_come(spans), _absent_ranks(record, spans)
    return {
        rank: [_with_the_awaited(span, rank, last, absent) for span in operations]
        for rank, operations in spans.items()
    }


def _absent_ranks(
    record: CellRecord, spans: Mapping[int, Sequence[OperationSpan]]
) -> dict[_Met, tuple[int, ...]]:
    """Return for every collective that failed the members that never came to it."""
    failed = {
        (span.group, span.number) for met in spans.values() for span in met if span.failed and span.number
    }
    came = {(rank, span.group, span.number) for rank in spans for span in spans[rank]} if failed else ()
    # One whose short operations are only counted may have been there.
    known = [rank for rank in spans if not record.ranks[rank].omitted]
    silent = sorted({*known, *record.died})
    return {
        (group, number): tuple(
            rank for rank in silent if (rank, group, number) not in came and (not group or rank in group)
        )
        for group, number in failed
    }


def _last_to_come(spans: Mapping[int, Sequence[OperationSpan]]) -> dict[_Met, tuple[int, int]]:
    """Return for every collective its last member and when that one began it."""
    found: dict[_Met, tuple[int, int]] = {}
    for rank, operations in spans.items():
        for span in operations:
            if span.number:
                key = (span.group, span.number)
                found[key] = max(found.get(key, (0, -1)), (span.begin_ns, rank))
    return found


def _row(notes: RankTimeline, spans: Sequence[OperationSpan], zero: int) -> RankRow:
    statements = notes.statements
    began = statements[0][1] if statements else notes.began_ns
    return RankRow(
        rank=notes.rank,
        pid=notes.pid,
        began=(began - zero) / 1e9,
        ended=(notes.ended_ns - zero) / 1e9,
        spans=tuple(_pieces(notes, spans, zero)),
        statements=tuple((line, (ns - zero) / 1e9) for line, ns in statements),
        operations=notes.operations,
        omitted=notes.omitted,
        times=times_of(notes, zero),
    )


def _with_the_awaited(
    span: OperationSpan,
    rank: int,
    last: Mapping[_Met, tuple[int, int]],
    absent: Mapping[_Met, tuple[int, ...]],
) -> OperationSpan:
    """Return an operation with the rank that it waited for, as far as notes show."""
    if not span.number:
        known = span.awaited if span.awaited >= 0 or not span.name.startswith(_OF_TWO) else span.peer
        return span if span.awaited == known else span._replace(awaited=known)
    if span.failed and (never := absent[span.group, span.number]):
        return span._replace(awaited=span.awaited if span.awaited in never else never[0])
    came, latest = last[span.group, span.number]
    if latest == rank or came <= span.begin_ns:
        return span
    return span._replace(awaited=latest)


def _pieces(notes: RankTimeline, spans: Sequence[OperationSpan], zero: int) -> Iterator[Span]:
    """Yield a rank's whole time in the cell, in order."""

    def seconds(ns: int) -> float:
        return (ns - zero) / 1e9

    now = zero
    if notes.omitted and notes.noted_from_ns > notes.began_ns:
        yield Span(COMPUTING, seconds(now), seconds(notes.began_ns))
        yield Span(UNKNOWN, seconds(notes.began_ns), seconds(notes.noted_from_ns))
        now = notes.noted_from_ns
    for span in spans:
        start, end = max(span.begin_ns, now), max(span.end_ns, now)
        if start > now:
            yield Span(COMPUTING, seconds(now), seconds(start))
        middle = min(max(start, span.begin_ns + span.wait_ns), end)
        moving = Span(
            MOVING, seconds(middle), seconds(end), span.name, span.line, span.nbytes, span.peer,
            span.awaited if span.wait_ns else -1, span.failed,
        )  # fmt: skip
        if middle > start:
            yield replace(moving, kind=WAITING, begin=seconds(start), end=seconds(middle))
        if end > middle or middle == start:
            yield moving
        now = end
    if notes.ended_ns > now:
        yield Span(COMPUTING, seconds(now), seconds(notes.ended_ns))


# A timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
#
# The format is that of Google's document "Trace Event Format": complete events (``"ph": "X"``) with ``ts``
# and ``dur`` in microseconds, metadata events (``"ph": "M"``) for names.  Every rank is a process of its
# own. Readers leave out events of one thread that overlap without lying in each other, so that a nanosecond
# counts.

PRODUCER = "nbparallel"
"""Stands in the file, so that only such a one is overwritten."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return what `json.dump` is to write."""
    events = [event for row in timeline.rows for event in _events_of(row, timeline)]
    cell = f"In[{timeline.number}]" if timeline.number else "a call"
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": PRODUCER,
            "cell": cell,
            "source": "\n".join(timeline.source),
            "clock error in seconds": timeline.clock_error,
        },
    }


def _events_of(row: RankRow, timeline: Timeline) -> list[dict[str, Any]]:
    pid = row.pid if row.pid and not row.host else 1_000_000 + row.rank  # two hosts may have one number
    name = f"rank {row.rank}" + f" (host {row.host})" * bool(row.host) + f" ({row.died})" * bool(row.died)
    place = {"pid": pid, "tid": pid}
    named = {
        "process_name": {"name": name},
        "process_sort_index": {"sort_index": row.rank},
        "thread_name": {"name": "cell"},
    }
    ends = [begin for _, begin in row.statements[1:]] + [row.ended]
    pieces: list[tuple[str, str, float, float, dict[str, int]]] = []
    for (line, begin), end in zip(row.statements, ends, strict=False):
        label = f"line {line}: {timeline.text_of(line)}"[:80]
        pieces.append((label, "statement", begin, end, {"line": line}))
    for span in row.spans:
        if span.kind == WAITING:
            label = f"{span.operation}: waits" + f" for rank {span.waits_for}" * (span.waits_for >= 0)
            pieces.append((label, "waiting", span.begin, span.end, {"waits for": span.waits_for}))
        elif span.operation:
            args = {"line": span.line, "bytes": span.nbytes, "peer": span.peer}
            pieces.append((span.operation, "operation", span.begin, span.end, args))
    return [
        *({"ph": "M", **place, "name": what, "args": args} for what, args in named.items()),
        *(_complete(*piece) | place for piece in pieces),
    ]


def _complete(name: str, category: str, begin: float, end: float, args: dict[str, int]) -> dict[str, Any]:
    from_ns = round(begin * 1e9)
    times = {"ts": _microseconds(from_ns), "dur": _microseconds(max(0, round(end * 1e9) - from_ns))}
    return {"ph": "X", "name": name, "cat": category, **times, "args": args}


def _microseconds(nanoseconds: int) -> float:
    """Return a number from which a reader that truncates gets the same nanoseconds."""
    exact = nanoseconds / 1000
    return exact if int(exact * 1000) == nanoseconds else math.nextafter(exact, math.inf)
