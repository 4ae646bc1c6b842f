"""A timeline as a notebook shows it, and as text: what stands out, a strip a rank, and where waiting arose.

No script, and letters in the colour of the text around them, so that dark themes need nothing.  The rank
that the others waited for stands first, the others by how long they waited.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbparallel.distributed.tracing.profiling import profile
from nbparallel.errors import grouped, rank_list
from nbparallel.errors.text.escaping import escape_html, visible
from nbparallel.session.monitoring.timeline import (
    COMPUTING,
    MOVING,
    UNKNOWN,
    WAITING,
    RankRow,
    Span,
    Timeline,
)
from nbparallel.wire.units import seconds_text, size_text, time_unit
from nbparallel_widgets.sheet import (
    COLOURS,
    HEIGHT,
    HEIGHTS,
    KINDS,
    LETTERS,
    STYLE,
    WIDTH,
    Grid,
    areas,
    host_bodies,
    letters,
    strip,
    swatch,
)

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


LETTERS_WIDE = 60
"""Letters for the whole cell."""
SHOWN_WAITS = 6
"""Rows about waits between ranks, at most."""
_TICKS = 5


def text(timeline: Timeline) -> str:
    """Return the whole timeline as text."""
    label = max((len(f"rank {row.rank}") for row in timeline.rows), default=0)
    bars = []
    for host, rows in grouped((row.host, row) for row in ordered(timeline)).items():
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
    whole = sum(_sum(timeline, kind) for kind in KINDS)
    return stands_out(waits_by_culprit(timeline), _sum(timeline, WAITING), whole)


def verdict(timeline: Timeline) -> str:
    """Return it in one sentence: ``rank 1 came last to all_reduce (line 4): 3 ranks waited …``."""
    waiting, whole = _sum(timeline, WAITING), sum(_sum(timeline, kind) for kind in KINDS)
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


def more_text(rows: Sequence[RankRow], timeline: Timeline) -> str:
    """Return what the rows below the fold are: ``11 more like these: ranks 4-10, waited 5.7 to 7.6 s``."""
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
    ranks = rank_list([row.rank for row in timeline.rows])
    what = f"In[{timeline.number}]" if timeline.number else "the last call"
    begin, end = (seconds_text(time) for time in (timeline.begin, timeline.begin + timeline.seconds))
    return f"{what} on {ranks}: {f'{begin} to ' * bool(timeline.begin)}{end}"


def legend(timeline: Timeline) -> str:
    """Return which letter means what."""
    kinds = {span.kind for row in timeline.rows for span in row.spans} | set(KINDS)
    return "   ".join(f"{LETTERS[kind]} {kind}" for kind in LETTERS if kind in kinds)


def bar(row: RankRow, seconds: float) -> str:
    """Return one letter for each part of the cell: what took most of it; blank where the cell did not run."""
    if row.died:
        return row.died[:LETTERS_WIDE].ljust(LETTERS_WIDE)
    between = row.between()
    pieces = (
        (span.begin, span.end, between if span.kind == COMPUTING else {span.kind: 1.0}) for span in row.spans
    )
    return letters(pieces, seconds, LETTERS_WIDE)


def waits_grid(timeline: Timeline) -> Grid:
    """Return which ranks waited for which, equal places in one row; the last row has the rest."""
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
        column = round(place / timeline.seconds * LETTERS_WIDE) if timeline.seconds else 0
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
    times = [{kind: row.total(kind) for kind in KINDS} for row in rows]
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


# As HTML.

SHOWN = 8
"""Rows above the fold: the first, and those that waited longest."""
COLUMN = 3.0
"""Thousandths of the width: what is narrower is drawn together with its neighbours."""


@dataclass(frozen=True, slots=True)
class TimelineView:
    """A timeline as a notebook shows it: strips and a table, or all in letters."""

    timeline: Timeline
    """From `Session.timeline`."""

    def __repr__(self) -> str:
        return text(self.timeline)

    def _repr_html_(self) -> str:
        timeline = self.timeline
        places, unit = axis(timeline)
        end = timeline.seconds or 1.0
        marked = held_up_by(timeline)
        rows = ordered(timeline)
        shown = _rows(rows[:SHOWN], timeline, marked)
        kinds = {span.kind for row in rows for span in row.spans} | set(KINDS)
        key = "".join(f"<span>{swatch(kind)}{kind}</span>" for kind in COLOURS if kind in kinds)
        more = rows[SHOWN:]
        fold = (
            f"<details><summary>{escape_html(more_text(more, timeline))}</summary>"
            f"{_table('', _rows(more, timeline, marked), 'more ranks')}</details>"
            if more
            else ""
        )
        marks = "".join(
            f'<span style="left:{100 * place / end:.2f}%">{label}{f" {unit}" * (i == len(places) - 1)}</span>'
            for i, (place, label) in enumerate(places)
        )
        said = escape_html(verdict(timeline))
        head = (
            f'<caption><div class="nbp-head"><b class="nbp-title">{said}</b>'
            f"<small>{escape_html(title(timeline))}</small></div>"
            f'<div class="nbp-more"><span>{escape_html(efficiency(timeline))}</span>{key}</div>'
            '</caption><thead><tr><th scope="col" class="nbp-rank">rank</th>'
            f'<th scope="col" class="nbp-bar"><div class="nbp-axis">{marks}</div></th>'
            f'<th scope="col" class="nbp-n">waited</th><th scope="col" class="nbp-state">note</th>'
            "</tr></thead>"
        )
        waits = waits_grid(timeline)
        below = "".join(f"<p>{escape_html(line)}</p>" for line in foot(timeline))
        return (
            f'{STYLE}<div class="nbp nbp-card nbp-timeline">{_table(head, shown, "")}{fold}'
            f'<div class="nbp-now">{below}</div>{waits.html() if waits.rows else ""}</div>'
        )


def _table(head: str, rows: str, caption: str) -> str:
    caption = caption and f'<caption class="nbp-hidden">{caption}</caption>'
    return f'<table class="nbp-ranks">{caption}{head}{rows}</table>'


def _rows(rows: Sequence[RankRow], timeline: Timeline, marked: int) -> str:
    groups = grouped((row.host, row) for row in rows).items()
    return host_bodies({h: [_row(row, timeline, row.rank == marked) for row in some] for h, some in groups})


def _row(row: RankRow, timeline: Timeline, marked: bool) -> str:
    waiting = sum(
        any(span.kind == WAITING and span.waits_for == row.rank for span in other.spans)
        for other in timeline.rows
    )
    words = f'<span class="nbp-chip">{waiting} rank{"s" * (waiting != 1)} waited</span>' * marked
    kind = ' class="nbp-hot"' if marked else ""
    if row.died:
        kind, words = ' class="nbp-wrong"', f'<span class="nbp-chip">{escape_html(row.died)}</span>'
    times = ", ".join(f"{kind} {seconds_text(row.total(kind))}" for kind in KINDS)
    return (
        f'<tr{kind}><th scope="row" class="nbp-rank">rank {row.rank}</th><td class="nbp-bar">'
        f"{strip(f'rank {row.rank}: {times}', ''.join(_pieces(row, timeline)))}</td>"
        f'<td class="nbp-n">{fixed_text(row.total(WAITING), timeline.seconds)}</td>'
        f'<td class="nbp-state">{words}</td></tr>'
    )


def _pieces(row: RankRow, timeline: Timeline) -> Iterator[str]:
    """Draw the spans of a rank: those that can be seen by themselves with what they are, others together."""
    scale, between = WIDTH / (timeline.seconds or 1.0), row.between()
    narrow: list[Span] = []
    for span in row.spans:
        mixed = span.kind == COMPUTING and len(between) > 1
        if span.seconds * scale >= COLUMN and not mixed:
            yield from _together(narrow, between, timeline)
            narrow = []
            h, about = HEIGHTS[span.kind], escape_html(_about_span(span))
            yield (
                f'<rect x="{span.begin * scale:.1f}" y="{HEIGHT - h}" width="{span.seconds * scale:.1f}" '
                f'height="{h}" fill="{COLOURS[span.kind]}"><title>{about}</title></rect>'
            )
        else:
            narrow.append(span)
    yield from _together(narrow, between, timeline)


def _together(spans: Sequence[Span], between: Mapping[str, float], timeline: Timeline) -> Iterator[str]:
    """Draw spans that are too narrow to be seen one by one: each kind as high as its share of the time."""
    if not spans:
        return
    least = COLUMN * (timeline.seconds or 1.0) / WIDTH
    stretches: list[list[float]] = []
    for span in spans:
        if span.kind == UNKNOWN:
            continue
        if not stretches or stretches[-1][1] - stretches[-1][0] >= least:
            stretches.append([span.begin, span.end, 0.0, 0.0, 0.0])
        stretches[-1][1] = span.end
        for kind, share in (between if span.kind == COMPUTING else {span.kind: 1.0}).items():
            stretches[-1][2 + KINDS.index(kind)] += span.seconds * share
    count = sum(bool(span.operation) for span in spans)
    about = f"{count:,} short pieces of operations, {seconds_text(spans[-1].end - spans[0].begin)}"
    yield f"<g><title>{about}</title>{''.join(areas([*map(tuple, stretches)], timeline.seconds or 1.0))}</g>"


def _about_span(span: Span) -> str:
    if not span.operation:
        return f"{span.kind}, {seconds_text(span.seconds)}"
    parts = [f"{span.operation}: {span.kind}"]
    if span.kind == WAITING:
        parts[0] += f" for rank {span.waits_for}" if span.waits_for >= 0 else " for others"
    parts.append(seconds_text(span.seconds))
    if span.nbytes:
        parts.append(size_text(span.nbytes))
    if span.failed:
        parts.append("it raised an error")
    if span.line:
        parts.append(f"line {span.line}")
    return ", ".join(parts)
