"""A timeline as text, for terminals and text files; and its table, which is shown below the picture too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nbparallel.errors.text.escaping import visible
from nbparallel.errors.text.table import Table
from nbparallel.session.monitoring.timeline import (
    COMPUTING,
    MOVING,
    UNKNOWN,
    WAITING,
    OperationWait,
    RankRow,
    Timeline,
)
from nbparallel.wire.units import seconds_text, time_unit

# Axes of time: one unit for a whole axis, round numbers at its ticks.


def ticks(seconds: float, most: int) -> tuple[list[tuple[float, str]], str]:
    """Return where an axis from 0 to `seconds` has its ticks, with their labels, and its unit.

    >>> ticks(0.9, 5)
    ([(0.0, '0'), (0.2, '200'), (0.4, '400'), (0.6, '600'), (0.8, '800')], 'ms')
    """
    unit, size = time_unit(seconds)
    whole = seconds / size
    if whole <= 0:
        return [(0.0, "0")], unit
    rough = whole / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    count = math.floor(whole / step + 1e-9)
    return [(round(i * step * size, 12), f"{round(i * step, 9):g}") for i in range(count + 1)], unit


def fixed_text(seconds: float, whole: float) -> str:
    """Return a time in the unit and with the decimals that all times of a table have, which go up to `whole`.

    >>> fixed_text(0.3, 5.0), fixed_text(0, 5.0), fixed_text(12.3456, 50), fixed_text(0.0123, 0.05)
    ('0.30 s', '0.00 s', '12.3 s', '12.3 ms')
    """
    if whole >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.2f} s" if whole >= 1 else f"{1000 * seconds:.1f} ms"


def next_round(seconds: float) -> float:
    """Return the next round number: the end of an axis of something that grows.

    >>> next_round(1.2), next_round(4.9), next_round(5), next_round(41)
    (1.5, 5.0, 5.0, 50.0)
    """
    power = 10.0 ** math.floor(math.log10(seconds))
    steps = (step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10))
    return next(step for step in steps if step >= seconds * (1 - 1e-9))


WIDTH = 60
"""Letters for the whole cell."""
LETTERS = {COMPUTING: "█", WAITING: "·", MOVING: "▒", UNKNOWN: "?"}
SHOWN_WAITS = 6
"""Lines about waits between ranks, at most."""
_TICKS = 5


def text(timeline: Timeline) -> str:
    """Return the whole timeline as text."""
    label = max((len(f"rank {row.rank}") for row in timeline.rows), default=0)
    bars = [f"{f'rank {row.rank}':<{label}} |{bar(row, timeline.seconds)}|" for row in timeline.rows]
    parts = [title(timeline), legend(timeline), *bars, _axis(timeline.seconds, label + 2)]
    return "\n".join([*map(visible, parts), table(timeline).text()])


def title(timeline: Timeline) -> str:
    """Return what it is about: ``In[3] on ranks 0-3: 1.3 s``."""
    from nbparallel.errors import rank_list

    ranks = rank_list([row.rank for row in timeline.rows])
    what = f"In[{timeline.number}]" if timeline.number else "the last call"
    return f"{what} on {ranks}: {seconds_text(timeline.seconds)}"


def legend(timeline: Timeline) -> str:
    """Return which letter means what."""
    kinds = {span.kind for row in timeline.rows for span in row.spans} | {COMPUTING, WAITING, MOVING}
    return "   ".join(f"{LETTERS[kind]} {kind}" for kind in LETTERS if kind in kinds)


def bar(row: RankRow, seconds: float) -> str:
    """Return one letter for each part of the cell: what took most of it; blank where the cell did not run."""
    if row.died:
        return row.died[:WIDTH].ljust(WIDTH)
    shares: list[dict[str, float]] = [{} for _ in range(WIDTH)]
    part = seconds / WIDTH or 1.0
    for span in row.spans:
        first, last = int(span.begin / part), min(int(span.end / part), WIDTH - 1)
        for i in range(first, last + 1):
            length = min(span.end, (i + 1) * part) - max(span.begin, i * part)
            shares[i][span.kind] = shares[i].get(span.kind, 0.0) + max(0.0, length)
    return "".join(LETTERS[max(share, key=lambda kind: share[kind])] if share else " " for share in shares)


def table(timeline: Timeline) -> Table:
    """Return how long each rank did what, and below it `foot`."""
    waits = timeline.waits()
    rows = [
        (
            str(row.rank),
            *(seconds_text(row.total(kind)) for kind in (COMPUTING, WAITING, MOVING)),
            f"{row.operations:,}",
            _most(row, waits),
        )
        if not row.died
        else (str(row.rank), "", "", "", "", row.died)
        for row in timeline.rows
    ]
    head = ("rank", COMPUTING, WAITING, MOVING, "operations", "waited most")
    return Table("", head, rows, "\n".join(foot(timeline))).without_empty_columns()


def _most(row: RankRow, waits: Sequence[OperationWait]) -> str:
    return next((_for_whom(wait) for wait in waits if wait.rank == row.rank), "")


def _for_whom(wait: OperationWait) -> str:
    cause = f"for rank {wait.waits_for}" if wait.waits_for >= 0 else "for others"
    where = f", line {wait.line}" if wait.line else ""
    return f"{cause} in {wait.operation}{where}"


def foot(timeline: Timeline) -> list[str]:
    """Return which rank waited for which, in lines; short ones are only summed up."""
    lines = []
    waits = timeline.waits()
    long = [wait for wait in waits[:SHOWN_WAITS] if wait.seconds >= timeline.seconds / 100]
    for wait in long:
        often = f", {wait.count:,} times" if wait.count > 1 else ""
        code = timeline.text_of(wait.line)
        lines.append(
            f"rank {wait.rank} waited {seconds_text(wait.seconds)} {_for_whom(wait)}{often}"
            + (f":  {code[:50]}" if code else "")
        )
    if rest := waits[len(long) :]:
        many = f"{len(rest)} short{'er' * bool(long)} wait{'s' * (len(rest) != 1)}"
        lines.append(f"{'and ' if long else ''}{many}, {seconds_text(sum(w.seconds for w in rest))} in all")
    omitted = [row for row in timeline.rows if row.omitted > 0]
    if omitted:
        counts = ", ".join(f"rank {row.rank}: {row.omitted:,}{_hidden_wait(row)}" for row in omitted)
        lines.append(f"short operations that were counted, not drawn: {counts}")
    return lines


def _hidden_wait(row: RankRow) -> str:
    """Return how long a rank waited in operations that are not drawn, if that is much."""
    hidden = row.total(WAITING) - sum(span.seconds for span in row.spans if span.kind == WAITING)
    return f" ({seconds_text(hidden)} waiting)" if hidden > row.ended / 100 else ""


def _axis(seconds: float, indent: int) -> str:
    line = ""
    places, unit = ticks(seconds, _TICKS)
    for place, label in places:
        column = round(place / seconds * WIDTH) if seconds else 0
        if column >= len(line):
            line = line.ljust(column) + label + " "
    return f"{' ' * indent}{line}{unit}"
