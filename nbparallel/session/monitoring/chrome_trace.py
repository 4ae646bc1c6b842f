"""A timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is that of Google's document "Trace Event Format": complete events (``"ph": "X"``) with ``ts`` and
``dur`` in microseconds, metadata events (``"ph": "M"``) for names.  Every rank is a process of its own.
Readers leave out events of one thread that overlap without lying in each other, so that a nanosecond counts.
"""

from __future__ import annotations

import math
from typing import Any

from nbparallel.session.monitoring.timeline import COMPUTING, WAITING, RankRow, Span, Timeline

PRODUCER = "nbparallel"
"""Stands in the file, so that only such a one is overwritten."""


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return what `json.dump` is to write."""
    events = [event for row in timeline.rows for event in _row(row, timeline)]
    cell = f"In[{timeline.number}]" if timeline.number else "a call"
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": PRODUCER, "cell": cell, "source": "\n".join(timeline.source)},
    }


def _row(row: RankRow, timeline: Timeline) -> list[dict[str, Any]]:
    pid = row.pid or 1_000_000 + row.rank  # of a dead rank nothing but its number is known
    name = f"rank {row.rank}" + (f" ({row.died})" if row.died else "")
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "tid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": pid, "name": "process_sort_index", "args": {"sort_index": row.rank}},
        {"ph": "M", "pid": pid, "tid": pid, "name": "thread_name", "args": {"name": "cell"}},
    ]
    place = {"pid": pid, "tid": pid}
    ends = [begin for _, begin in row.statements[1:]] + [row.ended]
    for (line, begin), end in zip(row.statements, ends, strict=False):
        label = f"line {line}: {timeline.text_of(line)}"[:80]
        events.append(_complete(label, "statement", begin, end, {"line": line}, place))
    for span in _operations(row.spans):
        args = {"line": span.line, "bytes": span.nbytes}
        if span.peer >= 0:
            args["peer"] = span.peer
        events.append(_complete(span.operation, "operation", span.begin, span.end, args, place))
    for span in row.spans:
        if span.kind == WAITING:
            name = f"waits for rank {span.waits_for}" if span.waits_for >= 0 else "waits"
            events.append(
                _complete(name, "waiting", span.begin, span.end, {"waits for": span.waits_for}, place)
            )
    return events


def _operations(spans: tuple[Span, ...]) -> list[Span]:
    """Return the operations whole: what waits and then moves is one."""
    found: list[Span] = []
    waiting: Span | None = None
    for span in spans:
        if waiting is not None and (span.operation != waiting.operation or span.begin != waiting.end):
            found.append(waiting)
            waiting = None
        if span.kind == WAITING:
            waiting = span
        elif span.kind != COMPUTING and span.operation:
            begin = waiting.begin if waiting is not None else span.begin
            found.append(Span(span.kind, begin, span.end, span.operation, span.line, span.nbytes, span.peer))
            waiting = None
    return found if waiting is None else [*found, waiting]


def _complete(
    name: str, category: str, begin: float, end: float, args: dict[str, Any], place: dict[str, int]
) -> dict[str, Any]:
    from_ns = round(begin * 1e9)
    times = {"ts": _microseconds(from_ns), "dur": _microseconds(max(0, round(end * 1e9) - from_ns))}
    return {"ph": "X", "name": name, "cat": category, **times, **place, "args": args}


def _microseconds(nanoseconds: int) -> float:
    """Return a number from which a reader that truncates gets the same nanoseconds."""
    exact = nanoseconds / 1000
    return exact if int(exact * 1000) == nanoseconds else math.nextafter(exact, math.inf)
