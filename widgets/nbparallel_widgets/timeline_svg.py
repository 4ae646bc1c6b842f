"""A timeline as a picture: one SVG element, without scripts or style sheets.

Text and lines take the colour of the text around them, so that dark themes need nothing.  The three kinds
differ in colour (Okabe and Ito's, which people with any kind of colour blindness distinguish, at more than
3:1 on white and on black) and in form: computing fills the row, moving is lower, waiting is a thin line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nbparallel.errors.text.escaping import escape_html
from nbparallel.session.monitoring.timeline import (
    COMPUTING,
    MOVING,
    UNKNOWN,
    WAITING,
    RankRow,
    Span,
    Timeline,
)
from nbparallel.wire.units import seconds_text, size_text
from nbparallel_widgets import timeline_text
from nbparallel_widgets.palette import BLUE, GREEN, GREY, VERMILLION
from nbparallel_widgets.timeline_text import ticks

COLOURS = {COMPUTING: BLUE, WAITING: VERMILLION, MOVING: GREEN, UNKNOWN: GREY}
HEIGHTS = {COMPUTING: 20.0, WAITING: 6.0, MOVING: 13.0, UNKNOWN: 3.0}
WIDTH, LEFT, RIGHT = 860, 64, 24
LEAST_WIDTH = 640
"""A narrower page scrolls: letters stay readable."""
ROW, GAP, TOP, BOTTOM = 20, 14, 54, 42
LEAST = 1.5
"""Width of what would be too narrow to be seen."""
COLUMN = 3.0
"""Width of what shows many short spans."""
MARKED = 40
"""Waits that have a line to the rank that was waited for."""
_TICKS = 8


def svg(timeline: Timeline) -> str:
    """Return the picture."""
    rows = timeline.rows
    height = TOP + len(rows) * (ROW + GAP) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / (timeline.seconds or 1.0)
    about = escape_html(_about(timeline))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{about}" '
        f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'style="max-width:max(100%,{LEAST_WIDTH}px);height:auto" '
        'fill="currentColor" font-family="sans-serif" font-size="12">',
        f"<desc>{about}</desc>",
        *_legend(timeline),
        *_axis(timeline.seconds, scale, height - BOTTOM + 4),
    ]
    places = {row.rank: TOP + i * (ROW + GAP) for i, row in enumerate(rows)}
    for row in rows:
        parts += _row(row, timeline, places[row.rank], scale)
    parts += _marks(rows, places, scale, timeline.seconds)
    return "".join([*parts, "</svg>"])


def _about(timeline: Timeline) -> str:
    totals = "; ".join(
        f"rank {row.rank}: "
        + (
            row.died
            or ", ".join(f"{kind} {seconds_text(row.total(kind))}" for kind in (COMPUTING, WAITING, MOVING))
        )
        for row in timeline.rows
    )
    return f"Timeline of {timeline_text.title(timeline)}. {totals}"


def _legend(timeline: Timeline) -> Iterator[str]:
    yield f'<text x="0" y="14" font-weight="bold">{escape_html(timeline_text.title(timeline))}</text>'
    kinds = {span.kind for row in timeline.rows for span in row.spans} | {COMPUTING, WAITING, MOVING}
    x = 0  # a narrow page shows the left part first
    for kind in (kind for kind in COLOURS if kind in kinds):
        h = HEIGHTS[kind] * 0.6
        yield f'<rect x="{x}" y="{36 - h:.1f}" width="18" height="{h:.1f}" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{x + 23}" y="35">{kind}</text>'
        x += 92


def _axis(seconds: float, scale: float, y: float) -> Iterator[str]:
    line = 'stroke="currentColor" stroke-width="1"'
    yield f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" {line}/>'
    places, unit = ticks(seconds, _TICKS)
    for place, label in places:
        x = LEFT + place * scale
        yield f'<path d="M{x:.1f} {y}v5" {line}/>'
        yield f'<path d="M{x:.1f} {TOP - 6}V{y}" {line} stroke-opacity="0.15"/>'
        yield f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{label}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{y + 34}" text-anchor="middle">time since the cell began, in {unit}</text>'


def _row(row: RankRow, timeline: Timeline, y: float, scale: float) -> Iterator[str]:
    yield f'<text x="{LEFT - 8}" y="{y + ROW - 5}" text-anchor="end">rank {row.rank}</text>'
    if row.died:
        yield f'<text x="{LEFT + 4}" y="{y + ROW - 5}" font-style="italic">{escape_html(row.died)}</text>'
    narrow: list[Span] = []
    for span in row.spans:
        if span.seconds * scale < COLUMN:
            narrow.append(span)
            continue
        yield from _together(narrow, timeline, y, scale)
        narrow = []
        yield _piece(span, timeline, y, scale)
    yield from _together(narrow, timeline, y, scale)


def _piece(span: Span, timeline: Timeline, y: float, scale: float) -> str:
    h, x, width = HEIGHTS[span.kind], LEFT + span.begin * scale, max(LEAST, span.seconds * scale)
    about = escape_html(_about_span(span, timeline))
    piece = (
        f'<rect x="{x:.2f}" y="{y + ROW - h:.1f}" width="{width:.2f}" height="{h:g}" '
        f'fill="{COLOURS[span.kind]}"><title>{about}</title></rect>'
    )
    if span.kind == WAITING and span.waits_for >= 0:
        label = f"waits for rank {span.waits_for}" if width > 100 else f"for {span.waits_for}"
        if width > 36:
            piece += (
                f'<text x="{x + width / 2:.1f}" y="{y + ROW - h - 3:.1f}" text-anchor="middle" '
                f'font-size="10.5">{label}</text>'
            )
    return piece


def _about_span(span: Span, timeline: Timeline) -> str:
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
    code = timeline.text_of(span.line)
    return ", ".join(parts) + (f"\n{code[:80]}" if code else "")


def _together(spans: Sequence[Span], timeline: Timeline, y: float, scale: float) -> Iterator[str]:
    """Draw spans that are too narrow to be seen one by one: each kind as high as its share of the time."""
    operations = [span for span in spans if span.operation]
    if len(operations) <= 2:  # one operation that waited and then moved, or a pause between two
        yield from (_piece(span, timeline, y, scale) for span in spans)
        return
    paths = dict.fromkeys(COLOURS, "")
    first = 0
    for i, span in enumerate(spans):
        width = max(LEAST, (span.end - spans[first].begin) * scale)
        if width < COLUMN and i + 1 < len(spans):
            continue
        part, bottom = spans[first : i + 1], y + ROW
        whole = sum(span.seconds for span in part) or 1.0
        x = LEFT + part[0].begin * scale
        for kind in COLOURS:
            h = ROW * sum(span.seconds for span in part if span.kind == kind) / whole
            if h >= 0.1:
                bottom -= h
                paths[kind] += f"M{x:.1f} {bottom:.1f}h{width:.1f}v{h:.1f}h-{width:.1f}z"
        first = i + 1
    about = f"{len(operations):,} short pieces of operations, {seconds_text(spans[-1].end - spans[0].begin)}"
    yield f"<g><title>{about}</title>"
    yield from (f'<path d="{path}" fill="{COLOURS[kind]}"/>' for kind, path in paths.items() if path)
    yield "</g>"


def _marks(rows: Sequence[RankRow], places: dict[int, int], scale: float, seconds: float) -> Iterator[str]:
    """Draw a line from the rank that was waited for to the rank that continued, for the longest waits."""
    waits = [
        (span.seconds, span, row.rank)
        for row in rows
        for span in row.spans
        if span.kind == WAITING and span.waits_for in places and span.seconds > seconds / 50
    ]
    for _, span, rank in sorted(waits, key=lambda wait: -wait[0])[:MARKED]:
        x, here, there = LEFT + span.end * scale, places[rank], places[span.waits_for]
        below = there > here
        start = there if below else there + ROW
        stop = here + ROW if below else here + ROW - HEIGHTS[WAITING]
        yield (
            f'<path d="M{x:.1f} {start}V{stop:.1f}" stroke="{COLOURS[WAITING]}" stroke-width="1.5" '
            'stroke-dasharray="3 2" fill="none"/>'
            f'<circle cx="{x:.1f}" cy="{start}" r="3" fill="{COLOURS[WAITING]}"/>'
        )


@dataclass(frozen=True, slots=True)
class TimelineView:
    """A timeline as a notebook shows it: a picture and a table, or all in letters."""

    timeline: Timeline
    """From `Session.timeline`."""

    def __repr__(self) -> str:
        return timeline_text.text(self.timeline)

    def _repr_html_(self) -> str:
        # The table repeats it where a page is cleaned of pictures (GitHub, an untrusted notebook).
        table = replace(timeline_text.table(self.timeline), foot="").html()
        lines = "<br>".join(escape_html(line) for line in timeline_text.foot(self.timeline))
        about = 'role="group" aria-label="timeline" tabindex="0" style="overflow-x:auto"'
        return f"<div {about}>{svg(self.timeline)}</div>{table}<div>{lines}</div>"
