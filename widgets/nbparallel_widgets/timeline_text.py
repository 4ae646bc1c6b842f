"""A timeline as text, for terminals and text files; and its table, which is shown below the picture too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from nbparallel.distributed.tracing.profiling import profile
from nbparallel.errors.text.escaping import visible
from nbparallel.session.monitoring.activity import RankActivity
from nbparallel.session.monitoring.timeline import (
    COMPUTING,
    MOVING,
    UNKNOWN,
    WAITING,
    RankRow,
    Timeline,
)
from nbparallel.wire.units import seconds_text, size_text, time_unit
from nbparallel_widgets.grid import Grid

# Axes of time: one unit for a whole axis, round numbers at its ticks.


def ticks(seconds: float, most: int, begin: float = 0.0) -> tuple[list[tuple[float, str]], str]:
    """Return where an axis from `begin` to `seconds` has its ticks, with their labels, and its unit.

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
    first = math.ceil(begin / size / step - 1e-9)
    return [(round(i * step * size, 12), f"{round(i * step, 9):g}") for i in range(first, count + 1)], unit


def axis(timeline: Timeline) -> tuple[list[tuple[float, str]], str]:
    """Return the ticks of a timeline, whose labels count from the cell's beginning; and their unit."""
    whole = timeline.begin + timeline.seconds
    places, unit = ticks(whole, int(_TICKS * whole / (timeline.seconds or 1.0)) or _TICKS, timeline.begin)
    return [(place - timeline.begin, label) for place, label in places], unit


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


_Row = TypeVar("_Row", RankRow, RankActivity)
WIDTH = 60
"""Letters for the whole cell."""
LETTERS = {COMPUTING: "█", WAITING: "·", MOVING: "▒", UNKNOWN: "?"}
SHOWN_WAITS = 6
"""Rows about waits between ranks, at most."""
_TICKS = 5
_KINDS = (COMPUTING, WAITING, MOVING)


def text(timeline: Timeline) -> str:
    """Return the whole timeline as text."""
    label = max((len(f"rank {row.rank}") for row in timeline.rows), default=0)
    bars = []
    for host, rows in by_host(ordered(timeline)).items():
        bars += [f"host {host}"] * bool(host)
        bars += [
            f"{f'rank {row.rank}':<{label}} |{bar(row, timeline.seconds)}| "
            f"{fixed_text(row.total(WAITING), timeline.seconds)}"
            for row in rows
        ]
    parts = [
        verdict(timeline),
        title(timeline),
        legend(timeline),
        *bars,
        f"{_axis(timeline, label + 2)} (at the right: waited)",
        efficiency(timeline),
        *foot(timeline),
        waits.text() if (waits := waits_grid(timeline)).rows else "",
    ]
    return "\n".join(visible(part) for part in parts if part)


# What stands out.


def waits_by_culprit(timeline: Timeline) -> dict[int, float]:
    """Return for how long each rank was waited for, as far as waits were noted."""
    found: dict[int, float] = {}
    for wait in timeline.waits():
        if wait.waits_for >= 0:
            found[wait.waits_for] = found.get(wait.waits_for, 0.0) + wait.seconds
    return found


def stands_out(awaited: Mapping[int, float], waiting: float, whole: float) -> int:
    """Return the rank that others waited for in more than half of all their waiting; -1: none stands out."""
    rank = max(awaited, key=lambda rank: awaited[rank], default=-1)
    return rank if rank >= 0 and awaited[rank] > waiting / 2 and waiting >= profile.WORTH * whole else -1


def held_up_by(timeline: Timeline) -> int:
    """Return the rank of a timeline that stands out."""
    whole = sum(_sum(timeline, kind) for kind in _KINDS)
    return stands_out(waits_by_culprit(timeline), _sum(timeline, WAITING), whole)


def verdict(timeline: Timeline) -> str:
    """Return it in one sentence: ``rank 1 came last to all_reduce (line 4): 3 ranks waited …``."""
    waiting, whole = _sum(timeline, WAITING), sum(_sum(timeline, kind) for kind in _KINDS)
    if died := [row for row in timeline.rows if row.died]:
        return f"rank {died[0].rank} {died[0].died}"
    rank = held_up_by(timeline)
    if rank < 0:
        share = f"{waiting / whole:.0%}".replace("%", " %") if whole else "0 %"
        spread = "no rank stands out: " if whole and waiting >= profile.WORTH * whole else ""
        return f"{spread}{share} of the time was waiting"
    places: dict[tuple[str, int], dict[int, float]] = {}
    for wait in timeline.waits():
        if wait.waits_for == rank:
            here = places.setdefault((wait.operation, wait.line), {})
            here[wait.rank] = here.get(wait.rank, 0.0) + wait.seconds
    (operation, line), ranks = max(places.items(), key=lambda place: sum(place[1].values()))
    times = sorted(ranks.values())
    least, most = (fixed_text(time, timeline.seconds) for time in (times[0], times[-1]))
    if sum(times) < waits_by_culprit(timeline)[rank] / 2:
        return f"rank {rank} held the others up: they waited {seconds_text(sum(times))} for it"
    span = f"{least.split()[0]} to {most}" if least != most else most
    many = f"{len(times)} ranks waited {span}, {seconds_text(sum(times))} in all"
    if len(times) == 1:
        many = f"rank {next(iter(ranks))} waited {most}"
    return f"rank {rank} came last to {operation}{f' (line {line})' * bool(line)}: {many}"


def ordered(timeline: Timeline) -> list[RankRow]:
    """Return the rows: the rank that others waited for first, the others by how long they waited."""
    first = held_up_by(timeline)
    return sorted(timeline.rows, key=lambda row: (row.rank != first, -row.total(WAITING), row.rank))


def by_host(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """Return rows by the name of their host, that of the first one first; no name: this machine."""
    found: dict[str, list[_Row]] = {}
    for row in rows:
        found.setdefault(row.host, []).append(row)
    return found


def more(rows: Sequence[RankRow], timeline: Timeline) -> str:
    """Return what the rows below the fold are: ``11 more like these: ranks 4-10, waited 5.7 to 7.6 s``."""
    from nbparallel.errors import rank_list

    least, most = (fixed_text(row.total(WAITING), timeline.seconds) for row in (rows[-1], rows[0]))
    ranks = rank_list([row.rank for row in rows])
    return f"{len(rows)} more: {ranks}, waited {least.split()[0]} to {most}"


def efficiency(timeline: Timeline) -> str:
    """Return how much of the ranks' time was computing."""
    return profile.efficiency(
        [row.total(COMPUTING) for row in timeline.rows if not row.died], timeline.seconds
    )


def _sum(timeline: Timeline, kind: str) -> float:
    return sum(row.total(kind) for row in timeline.rows)


def title(timeline: Timeline) -> str:
    """Return what it is about: ``In[3] on ranks 0-3: 1.3 s``."""
    from nbparallel.errors import rank_list

    ranks = rank_list([row.rank for row in timeline.rows])
    what = f"In[{timeline.number}]" if timeline.number else "the last call"
    begin, end = (seconds_text(time) for time in (timeline.begin, timeline.begin + timeline.seconds))
    return f"{what} on {ranks}: {f'{begin} to ' * bool(timeline.begin)}{end}"


def legend(timeline: Timeline) -> str:
    """Return which letter means what."""
    kinds = {span.kind for row in timeline.rows for span in row.spans} | {COMPUTING, WAITING, MOVING}
    return "   ".join(f"{LETTERS[kind]} {kind}" for kind in LETTERS if kind in kinds)


def bar(row: RankRow, seconds: float) -> str:
    """Return one letter for each part of the cell: what took most of it; blank where the cell did not run."""
    if row.died:
        return row.died[:WIDTH].ljust(WIDTH)
    shares: list[dict[str, float]] = [{} for _ in range(WIDTH)]
    part, between = seconds / WIDTH or 1.0, row.between()
    for span in row.spans:
        kinds = between if span.kind == COMPUTING else {span.kind: 1.0}
        first, last = int(span.begin / part), min(int(span.end / part), WIDTH - 1)
        for i in range(first, last + 1):
            length = max(0.0, min(span.end, (i + 1) * part) - max(span.begin, i * part))
            for kind, share in kinds.items():
                shares[i][kind] = shares[i].get(kind, 0.0) + length * share
    return "".join(LETTERS[max(share, key=lambda kind: share[kind])] if share else " " for share in shares)


def waits_grid(timeline: Timeline) -> Grid:
    """Return which ranks waited for which, equal places in one row; the last row has the rest."""
    from nbparallel.errors import rank_list

    groups: dict[tuple[str, int, int], tuple[float, set[int], int]] = {}
    for wait in timeline.waits():
        key = (wait.operation, wait.line, wait.waits_for)
        seconds, ranks, count = groups.get(key, (0.0, set(), 0))
        groups[key] = seconds + wait.seconds, ranks | {wait.rank}, count + wait.count
    longest = sorted(groups.items(), key=lambda group: -group[1][0])
    rows = [
        (
            seconds_text(seconds),
            rank_list(sorted(ranks)),
            f"rank {culprit}" if culprit >= 0 else "others",
            operation + (f", {count:,} times" if count > len(ranks) else ""),
            str(line) if line else "",
            timeline.text_of(line)[:50],
        )
        for (operation, line, culprit), (seconds, ranks, count) in longest[:SHOWN_WAITS]
    ]
    if rest := longest[SHOWN_WAITS:]:
        seconds = sum(found[0] for _, found in rest)
        rows.append((seconds_text(seconds), f"in {len(rest)} other places", "", "", "", ""))
    unseen = _sum(timeline, WAITING) - sum(found[0] for found in groups.values())
    if unseen > timeline.seconds / 100:
        rows.append((seconds_text(unseen), "in operations that are counted, not drawn", "", "", "", ""))
    head = ("waited", "which", "for", "in", "line", "code")
    return Grid("waiting, by operation and the rank waited for", head, rows)


def foot(timeline: Timeline) -> list[str]:
    """Return what to do better, and what is not drawn."""
    lines = [f"advice: {line}" for line in advice(timeline)]
    omitted = [row for row in timeline.rows if row.omitted > 0]
    if omitted:
        counts = ", ".join(f"rank {row.rank}: {row.omitted:,}" for row in omitted)
        lines.append(f"short operations that were counted, not drawn: {counts}")
    if timeline.clock_error is None:
        lines.append("the clocks of hosts were not compared: the rows of each begin when its ranks did")
    elif timeline.clock_error:
        lines.append(f"the clocks of hosts agree within {seconds_text(timeline.clock_error)}")
    return lines


def _axis(timeline: Timeline, indent: int) -> str:
    line = ""
    places, unit = axis(timeline)
    for place, label in places:
        column = round(place / timeline.seconds * WIDTH) if timeline.seconds else 0
        if column >= len(line):
            line = line.ljust(column) + label + " "
    return f"{' ' * indent}{line}{unit}"


# Advice: what cost much time, how much, and what of this library does it better.

MOST = 3
"""Lines, the most costly first."""
MANY, SMALL = 200, 4096
"""Operations of a rank, and their bytes on average."""
QUICK = 0.001
"""Seconds for one of them, waiting included: it is the calls that cost."""
LARGE = 1 << 20
"""Bytes."""
OFTEN = 3
"""Cells in a row."""


def advice(timeline: Timeline) -> list[str]:
    """Return at most three lines; none if nothing stands out."""
    if timeline.seconds < profile.SHORTEST or any(row.died for row in timeline.rows):
        return []
    found = sorted(_found(timeline), reverse=True)
    return [text for share, text in found if share >= profile.WORTH][:MOST]


def _found(timeline: Timeline) -> Iterator[tuple[float, str]]:
    """Yield what each rule says, with the share of the ranks' time that could be saved."""
    rows = timeline.rows
    times = [{kind: row.total(kind) for kind in (COMPUTING, WAITING, MOVING)} for row in rows]
    whole = sum(sum(kinds.values()) for kinds in times) or 1.0
    computing, waiting, moving = (sum(t[kind] for t in times) for kind in (COMPUTING, WAITING, MOVING))
    calls = sum(row.operations for row in rows)
    spans = [span for row in rows for span in row.spans if span.operation]
    nbytes = sum(span.nbytes for span in spans) / max(1, len(spans))
    small = calls >= MANY * len(rows) and nbytes <= SMALL and waiting + moving <= QUICK * calls
    if small and spans:
        (name, line), _ = Counter((span.operation, span.line) for span in spans).most_common(1)[0]
        share = (waiting + moving) / whole
        text = f"{calls // len(rows):,} small operations a rank took {_percent(share)} of the time, mostly "
        yield share, f"{text}{name} on line {line}: collect values in an array, and call it once for all"
    if len(rows) > timeline.cpus > 0:
        lost, used = computing - timeline.cpu_seconds, timeline.cpu_seconds - profile.WORTH * whole
        text = f"{len(rows)} ranks share {timeline.cpus} CPU{'s' * (timeline.cpus > 1)} and had none for "
        text += f"{_percent(lost / whole)} of the time: as many ranks as CPUs do as much"
        yield min(lost, used) / whole, text
    if not small:
        by_rank = {row.rank: kinds[COMPUTING] for row, kinds in zip(rows, times, strict=True)}
        yield profile.uneven_work(by_rank, waiting, whole)
    if timeline.private_nbytes >= LARGE:
        text = (
            f"moving data took {_percent(moving / whole)} of the time, and ranks passed arrays of their own, "
        )
        text += f"{size_text(timeline.private_nbytes)} in all: those of nbp.zeros are combined where they lie"
        yield moving / whole, text
    for name, (size, cells) in timeline.copied.items():
        if cells >= OFTEN:
            text = f"{name} ({size_text(size)}) was copied for each of the last {cells} cells: "
            yield profile.WORTH, f"{text}numbers in an array that you %share are never copied"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
