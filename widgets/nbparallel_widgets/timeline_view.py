"""A timeline as a notebook shows it: what stands out, a strip for each rank, and where waiting arose.

No script, and letters in the colour of the text around them, so that dark themes need nothing.  The rank
that the others waited for stands first, the others by how long they waited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbparallel.errors.text.escaping import escape_html
from nbparallel.session.monitoring.timeline import COMPUTING, UNKNOWN, WAITING, RankRow, Span, Timeline
from nbparallel.wire.units import seconds_text, size_text
from nbparallel_widgets import timeline_text
from nbparallel_widgets.panel_sheet import STYLE, host_bodies
from nbparallel_widgets.strip import COLOURS, HEIGHT, HEIGHTS, KINDS, WIDTH, areas, strip, swatch
from nbparallel_widgets.timeline_text import fixed_text

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
        return timeline_text.text(self.timeline)

    def _repr_html_(self) -> str:
        timeline = self.timeline
        places, unit = timeline_text.axis(timeline)
        end = timeline.seconds or 1.0
        marked = timeline_text.held_up_by(timeline)
        rows = timeline_text.ordered(timeline)
        shown = _rows(rows[:SHOWN], timeline, marked)
        kinds = {span.kind for row in rows for span in row.spans} | set(KINDS)
        key = "".join(f"<span>{swatch(kind)}{kind}</span>" for kind in COLOURS if kind in kinds)
        more = rows[SHOWN:]
        fold = (
            f"<details><summary>{escape_html(timeline_text.more(more, timeline))}</summary>"
            f"{_table('', _rows(more, timeline, marked), 'more ranks')}</details>"
            if more
            else ""
        )
        axis = "".join(
            f'<span style="left:{100 * place / end:.2f}%">{label}{f" {unit}" * (i == len(places) - 1)}</span>'
            for i, (place, label) in enumerate(places)
        )
        said = escape_html(timeline_text.verdict(timeline))
        head = (
            f'<caption><div class="nbp-head"><b class="nbp-title">{said}</b>'
            f"<small>{escape_html(timeline_text.title(timeline))}</small></div>"
            f'<div class="nbp-more"><span>{escape_html(timeline_text.efficiency(timeline))}</span>{key}</div>'
            '</caption><thead><tr><th scope="col" class="nbp-rank">rank</th>'
            f'<th scope="col" class="nbp-bar"><div class="nbp-axis">{axis}</div></th>'
            f'<th scope="col" class="nbp-n">waited</th><th scope="col" class="nbp-state">note</th>'
            "</tr></thead>"
        )
        foot = "".join(f"<p>{escape_html(line)}</p>" for line in timeline_text.foot(timeline))
        return (
            f'{STYLE}<div class="nbp nbp-card nbp-timeline">{_table(head, shown, "")}{fold}'
            f'<div class="nbp-now">{foot}</div>{_waits(timeline)}</div>'
        )


def _table(head: str, rows: str, caption: str) -> str:
    caption = caption and f'<caption class="nbp-hidden">{caption}</caption>'
    return f'<table class="nbp-ranks">{caption}{head}{rows}</table>'


def _waits(timeline: Timeline) -> str:
    grid = timeline_text.waits_grid(timeline)
    return grid.html() if grid.rows else ""


def _rows(rows: Sequence[RankRow], timeline: Timeline, marked: int) -> str:
    groups = timeline_text.by_host(rows).items()
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
