"""A session's activity as it is shown: as text, and as HTML without scripts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nbparallel.errors import LEFT_OUT, NO_RANKS, rank_list
from nbparallel.errors.text.escaping import escape_html
from nbparallel.errors.text.table import Table
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.session.monitoring.segments import SharedSegment
from nbparallel.session.monitoring.timeline import COMPUTING, MOVING, WAITING
from nbparallel.wire.units import seconds_text, size_text
from nbparallel_widgets.panel_grid import Grid
from nbparallel_widgets.panel_memory import memory_html, memory_text, segment_grids
from nbparallel_widgets.panel_sheet import STALE, STYLE, details_html, folded_html
from nbparallel_widgets.timeline_svg import COLOURS
from nbparallel_widgets.timeline_text import LETTERS, fixed_text, next_round, ticks

# What a session does at one moment, in one sentence; and what one rank does, in a few words.
#
# The ranks that the sentence is about stand between two asterisks: ``ranks 0, 2 wait for **rank 1**``.

_STRONG = re.compile(r"\*\*(.+?)\*\*")
_ABSENT = re.compile(rf"ranks? \d[-\d, ]* (?={LEFT_OUT} )")
"""Begins the error about ranks that left a call out."""
_CODE = re.compile(r"`(.+?)`")
_VERBS = {
    "failed": ("has failed", "have failed"),
    "dead": ("is dead", "are dead"),
    "unseen": ("is not seen", "are not seen"),
    "computing": ("computes", "compute"),
    "moving": ("moves data", "move data"),
    "waiting": ("waits", "wait"),
    "starting": ("starts", "start"),
    "finished": ("has finished", "have finished"),
    "interrupted": ("was interrupted", "were interrupted"),
    "released": ("was released", "were released"),
}
"""What one rank and several ranks do, in the order of the sentence."""
_BAD = ("failed", "dead")
LONGEST = 160
"""Characters of an error in a title; a deadlock of many ranks has more."""


def sentence(activity: SessionActivity) -> str:
    """Return what happens now, or how the last cell ended: ``In[3]: finished after 2.0 s``."""
    cell = f"In[{activity.number}]: " if activity.number else ""
    after = f"after {span_text(activity.seconds)}"
    match activity.phase:
        case "none":
            return f"{_ranks(activity.ranks)}: no cell has run yet"
        case "starting":
            count = activity.starting_ranks
            return f"starting {count} rank{'s' * (count != 1)}"
        case "moving":
            size = size_text(activity.moving_nbytes)
            return f"moving {size} of `{activity.moving_name}` into shared memory"
        case "running":
            return (cell or "a call: ") + _running(activity)
        case "failed":
            return (cell or "the last call ") + _failed(activity, after)
        case "interrupted":
            return f"{cell or 'the last call was '}interrupted {after}"
    return f"{cell or 'the last call '}finished {after}{_longest_wait(activity)}"


def plain(text: str) -> str:
    """Return a sentence as text."""
    return _STRONG.sub(r"\1", text)


def marked_html(text: str) -> str:
    """Return a sentence as HTML."""
    return _CODE.sub(r"<code>\1</code>", _STRONG.sub(r"<b>\1</b>", escape_html(text)))


def marked_ranks(activity: SessionActivity) -> frozenset[int]:
    """Return the ranks that the sentence is about: the others wait for them, or the cell failed there."""
    if activity.phase == "running":
        return frozenset(activity.culprits) | {rank.rank for rank in activity.ranks if rank.state in _BAD}
    if activity.phase != "failed":
        return frozenset()
    if _ABSENT.match(activity.failed_between):
        return frozenset(r.rank for r in activity.ranks if took_part(r) and r.state in ("idle", "finished"))
    return frozenset() if activity.failed_between else frozenset({activity.failed_rank} - {-1})


def rank_text(rank: RankActivity, activity: SessionActivity) -> str:
    """Return what a rank does: ``waiting for rank 2 in all_reduce, line 3``."""
    if rank.state == "unseen":
        return rank.operation
    if rank.state == "dead":
        return f"{_cause(rank)}; the next cell starts it again"
    if rank.state == "idle":
        if activity.phase not in ("finished", "failed", "interrupted"):
            return "idle"
        if not took_part(rank):
            return "took no part"
    text = {"moving": "moving data", "idle": "finished"}.get(rank.state, rank.state)
    if rank.state in ("idle", "finished") and rank.finished:
        text += f" after {span_text(rank.finished)}"
    if rank.state == "waiting" and rank.waits_for:
        text += f" for {rank_list(rank.waits_for)}"
    if rank.operation and rank.state in ("waiting", "moving"):
        text += f" in {rank.operation}"
    if rank.rank == activity.failed_rank and activity.failed_line:
        text += f", line {activity.failed_line}"
    elif rank.line and rank.state != "finished":
        text += f", {_lines(rank)}"
    if activity.phase == "running" and rank.rank in activity.culprits:
        text += "; others wait for it"
    return text


def took_part(rank: RankActivity) -> bool:
    """Return whether the cell that runs, or ran last, is or was on this rank."""
    return rank.state not in ("idle", "starting", "unseen") or bool(
        rank.computing or rank.waiting or rank.moving or rank.finished
    )


def span_text(seconds: float) -> str:
    """Return a time whose digits stay in their places while it grows."""
    return f"{seconds:.1f} s" if seconds >= 1 else seconds_text(seconds)


def _running(activity: SessionActivity) -> str:
    taking_part = [rank for rank in activity.ranks if took_part(rank)]
    waiting = [rank for rank in taking_part if rank.state == "waiting"]
    blocked = [rank for rank in waiting if rank.rank not in activity.culprits]
    if blocked and activity.culprits:
        longest = max(rank.seconds for rank in blocked)
        return f"{_do(blocked, 'waiting')} for {_culprits(activity, longest)}"
    if waiting and len(waiting) == len(taking_part):
        each_other = {rank for one in waiting for rank in one.waits_for} <= {rank.rank for rank in waiting}
        known = each_other and all(rank.waits_for for rank in waiting)
        longest = max(rank.seconds for rank in waiting)
        return f"{_do(waiting, 'waiting')}{' for each other' * known}, for {span_text(longest)}"
    parts = [
        _do(group, state)
        for state in _VERBS
        if (group := [rank for rank in taking_part if rank.state == state])
    ]
    return f"{'; '.join(parts) or 'it begins'}; {span_text(activity.seconds)} so far"


def _culprits(activity: SessionActivity, longest: float) -> str:
    """Return the ranks that are waited for, what they do, and for how long."""
    ranks = [rank for rank in activity.ranks if rank.rank in activity.culprits]
    name = f"**{_ranks(ranks)}**"
    if len(ranks) != 1:
        return f"{name}, for {span_text(longest)}"
    (rank,) = ranks
    line = f"{_lines(rank)}, " if rank.line else ""
    doing = _cause(rank) if rank.state == "dead" else rank.state
    return f"{name} ({line}{doing} for {span_text(rank.seconds or longest)})"


def _lines(rank: RankActivity) -> str:
    """Return the line that a rank is on, or those of the statement that it computes: perhaps a loop."""
    return f"lines {rank.line}-{rank.last_line}" if rank.last_line > rank.line else f"line {rank.line}"


def _failed(activity: SessionActivity, after: str) -> str:
    if between := activity.failed_between:
        absent = _ABSENT.match(between)
        end = absent.end() - 1 if absent else 0
        rest = between[end:LONGEST] + " …" * (len(between) > LONGEST)
        return f"failed {after}: " + (f"**{between[:end]}**" if end else "") + rest
    failed = next((rank for rank in activity.ranks if rank.rank == activity.failed_rank), None)
    if failed is None:
        return f"failed {after}"
    if failed.state == "dead":
        return f"failed {after}: **rank {failed.rank}** {_was(failed)}"
    line = f", line {activity.failed_line}," if activity.failed_line else ""
    alike = [rank for rank in activity.ranks if rank.state == "failed"]
    if failed in alike and len(alike) > 1:
        return f"failed on {_ranks(alike)}, first on **rank {failed.rank}**{line or ','} {after}"
    return f"failed on **rank {failed.rank}**{line} {after}"


def _longest_wait(activity: SessionActivity) -> str:
    """Return which rank waited longest, if that was a tenth of the cell or more."""
    waits = [
        (seconds, rank, awaited)
        for rank, row in enumerate(activity.waited)
        for awaited, seconds in enumerate(row)
        if rank != awaited
    ]
    seconds, rank, awaited = max(waits, default=(0.0, 0, 0), key=lambda wait: wait[0])
    if not seconds or seconds < activity.seconds / 10:
        return ""
    return f"; the longest wait: rank {rank} for **rank {awaited}**, {span_text(seconds)}"


def _do(ranks: list[RankActivity], state: str) -> str:
    mark = "**" if state in _BAD else ""
    return f"{mark}{_ranks(ranks)}{mark} {_VERBS[state][len(ranks) != 1]}"


def _ranks(ranks: Iterable[RankActivity]) -> str:
    return rank_list([rank.rank for rank in ranks])


def _was(rank: RankActivity) -> str:
    return rank.operation.partition(":")[0] or "died"


def _cause(rank: RankActivity) -> str:
    return _was(rank).removeprefix("was ")


# The ranks of a panel: a bar for each on one axis of time, its figures, and what it does.
#
# A bar adds up what the rank did in the cell so far, in this order: computing, waiting, moving data.  What is
# empty then is the time since the rank has finished.  A line below names bars as sums: on an axis of time
# they look like a course of time, which is the timeline.  The kinds differ in colour and in height, as there.

SHOWN = 64
"""Ranks in the table; of more, those that are not shown are counted below it."""
LETTERS_WIDE = 24
"""Letters of a bar in text."""
_KINDS = (COMPUTING, WAITING, MOVING)
_OWN = "own memory"
_SUMS = "each bar adds up a rank's times"
_WHEN = "; %parallel_timeline shows when"
"""Not where there are several hosts, each with a clock."""
_HEIGHT = 14
_HEIGHTS = {COMPUTING: 14, WAITING: 5, MOVING: 9}
_LEAST = 0.4
"""Width of the narrowest piece, in percent of the axis."""
_IMPORTANT = (
    "unseen",
    "dead",
    "failed",
    "computing",
    "moving",
    "waiting",
    "starting",
    "interrupted",
    "released",
    "finished",
    "idle",
)


def axis_end(activity: SessionActivity) -> float:
    """Return the seconds at which all bars end: round while the cell runs, so that they grow steadily."""
    longest = max([activity.seconds, *(_spent(rank) for rank in activity.ranks)])
    return next_round(max(longest, 1.0)) if activity.running else longest


def shown_ranks(activity: SessionActivity) -> tuple[RankActivity, ...]:
    """Return the ranks that have a row, in order: all, or the most important ones."""
    if len(activity.ranks) <= SHOWN:
        return activity.ranks
    marked = marked_ranks(activity)
    by_importance = sorted(
        activity.ranks, key=lambda rank: (rank.rank not in marked, _IMPORTANT.index(rank.state), rank.rank)
    )
    return tuple(sorted(by_importance[:SHOWN], key=lambda rank: rank.rank))


def ranks_html(activity: SessionActivity) -> str:
    """Return the sentence and the table."""
    activity = _before_it_begins(activity)
    end, marked, shown = axis_end(activity), marked_ranks(activity), shown_ranks(activity)
    places, unit = ticks(end, 4)
    lines = "".join(_line(100 * place / end) for place, _ in places[1:] if end)
    rows = "".join(_row(rank, activity, end, rank.rank in marked, lines) for rank in shown)
    names = "".join(f'<th scope="col" class="nbp-n">{_swatch(kind)}{kind}</th>' for kind in _KINDS)
    return (
        f'<table class="nbp-ranks"><caption>{marked_html(sentence(activity))}</caption>'
        f'<thead><tr><th scope="col" class="nbp-rank">rank</th>'
        f'<th scope="col" class="nbp-bar">{_axis(places, unit, end)}</th>'
        f'{names}<th scope="col" class="nbp-n nbp-own">{_OWN}</th>'
        f'<th scope="col" class="nbp-state">state</th></tr></thead><tbody>{rows}</tbody></table>'
        + "".join(
            f"<p>{escape_html(line)}</p>"
            for line in (*_rest(activity, shown), *[_sums(activity)] * bool(end))
        )
    )


def ranks_text(activity: SessionActivity) -> str:
    """Return the sentence and the table in letters."""
    activity = _before_it_begins(activity)
    end, marked, shown = axis_end(activity), marked_ranks(activity), shown_ranks(activity)
    head = ("rank", f"{LETTERS_WIDE * ' '}", *(f"{LETTERS[kind]} {kind}" for kind in _KINDS), _OWN, "state")
    rows = [
        (
            f"{'▶' if rank.rank in marked else ' '} {rank.rank}{_host(rank)}",
            _letters(rank, end),
            *_figures(rank, end),
            rank_text(rank, activity),
        )
        for rank in shown
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head) - 1)]
    right = range(2, len(head) - 1)
    aligned = [
        tuple(cell.rjust(widths[i]) if i in right else cell for i, cell in enumerate(row))
        for row in [head, *rows]
    ]
    axis = f"the bars end at {fixed_text(end, end)}; {_sums(activity)}" if end else ""
    foot = "\n".join(line for line in (axis, *_rest(activity, shown)) if line)
    return Table(plain(sentence(activity)), aligned[0], aligned[1:], foot).text()


def _sums(activity: SessionActivity) -> str:
    return _SUMS + _WHEN * (not any(rank.host for rank in activity.ranks))


def _before_it_begins(activity: SessionActivity) -> SessionActivity:
    """Return an activity without what the last cell did, while the next one is being prepared."""
    if activity.phase not in ("starting", "moving"):
        return activity
    ranks = [
        replace(
            rank,
            state=rank.state if rank.state in ("starting", "dead") else "idle",
            computing=0.0,
            waiting=0.0,
            moving=0.0,
            finished=0.0,
        )
        for rank in activity.ranks
    ]
    return replace(activity, seconds=0.0, ranks=tuple(ranks))


def _spent(rank: RankActivity) -> float:
    return rank.computing + rank.waiting + rank.moving


def _of(rank: RankActivity, kind: str) -> float:
    return {COMPUTING: rank.computing, WAITING: rank.waiting, MOVING: rank.moving}[kind]


def _figures(rank: RankActivity, end: float) -> tuple[str, ...]:
    times = (fixed_text(_of(rank, kind), end) if took_part(rank) else "-" for kind in _KINDS)
    return (*times, size_text(rank.private_nbytes) if rank.private_nbytes else "-")


def _rest(activity: SessionActivity, shown: Sequence[RankActivity]) -> list[str]:
    """Return a line about ranks that have no row."""
    hidden = set(activity.ranks) - set(shown)
    if not hidden:
        return []
    counts = {state: sum(rank.state == state for rank in hidden) for state in _IMPORTANT}
    states = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    return [f"… and {len(hidden):,} more ranks: {states}"]


def _letters(rank: RankActivity, end: float) -> str:
    bar, done = "", 0.0
    for kind in _KINDS:
        done += _of(rank, kind)
        bar += LETTERS[kind] * (round(LETTERS_WIDE * done / end) - len(bar) if end else 0)
    return f"|{bar:<{LETTERS_WIDE}}|"


def _row(rank: RankActivity, activity: SessionActivity, end: float, marked: bool, lines: str) -> str:
    *figures, own = _figures(rank, end)
    cells = "".join(f'<td class="nbp-n">{figure}</td>' for figure in (*figures, own))
    mark, kind = ("▶ ", ' class="nbp-marked"') if marked else ("", "")
    return (
        f'<tr{kind}><th scope="row" class="nbp-rank">{mark}rank {rank.rank}{escape_html(_host(rank))}</th>'
        f'<td class="nbp-bar">{_bar(rank, end, lines)}</td>{cells}'
        f'<td class="nbp-state">{escape_html(rank_text(rank, activity))}</td></tr>'
    )


def _host(rank: RankActivity) -> str:
    return rank.host and f" (host {rank.host})"


def _bar(rank: RankActivity, end: float, lines: str) -> str:
    about = ", ".join(f"{kind} {fixed_text(_of(rank, kind), end)}" for kind in _KINDS)
    return (
        f'<svg role="img" aria-label="rank {rank.rank}: {about} of {fixed_text(end, end)}" width="100%" '
        f'height="{_HEIGHT}" style="display:block;width:100%;height:{_HEIGHT}px">'
        f'<rect width="100%" height="{_HEIGHT}" fill="currentColor" fill-opacity="0.08"/>{lines}'
        f"{''.join(_pieces(rank, end))}</svg>"
    )


def _pieces(rank: RankActivity, end: float) -> Iterator[str]:
    x = 0.0
    for kind in _KINDS:
        width = 100 * _of(rank, kind) / end if end else 0.0
        if width >= _LEAST:
            h = _HEIGHTS[kind]
            yield (
                f'<rect x="{x:.2f}%" y="{(_HEIGHT - h) / 2:g}" width="{min(width, 100 - x):.2f}%" '
                f'height="{h}" fill="{COLOURS[kind]}"/>'
            )
        x += width


def _line(x: float) -> str:
    return (
        f'<line x1="{x:.2f}%" x2="{x:.2f}%" y2="{_HEIGHT}" stroke="currentColor" stroke-opacity="0.3"/>'
        if x < 99.9
        else ""
    )


def _axis(places: Sequence[tuple[float, str]], unit: str, end: float) -> str:
    """Return the labels of the ticks, the last one with the unit."""
    if not end:
        return "time"
    labels = []
    for i, (place, label) in enumerate(places):
        x = 100 * place / end
        shift = 0 if x < 3 else -100 if x > 88 else -50
        text = f"{label} {unit}" if i == len(places) - 1 else label
        labels.append(f'<span style="left:{x:.2f}%;transform:translateX({shift}%)">{text}</span>')
    return f'<div class="nbp-axis">{"".join(labels)}</div>'


def _swatch(kind: str) -> str:
    """Return a small piece of a bar, to stand before its name."""
    h = _HEIGHTS[kind]
    return (
        f'<svg aria-hidden="true" width="8" height="{_HEIGHT}" '
        f'style="display:inline-block;width:8px;height:{_HEIGHT}px;vertical-align:-2px;margin-right:4px">'
        f'<rect y="{(_HEIGHT - h) / 2:g}" width="8" height="{h}" fill="{COLOURS[kind]}"/></svg>'
    )


# Which rank waited for which, and which sent how much to which: two small tables, ranks by ranks.

SIDE = 16
"""Ranks by ranks that are shown; of more, the largest figures in a list."""
_LISTED = 20


def matrix_grids(activity: SessionActivity) -> list[Grid]:
    """Return the two tables of the cell that ran last, as far as they are known."""
    most = max((seconds for row in activity.waited for seconds in row), default=0.0)
    cell = f" in In[{activity.number}]" if activity.number else ""
    grids = []
    if activity.waited:
        grids.append(
            _grid(
                (f"Waiting time{cell}", "waited for", "no rank waited for another one"),
                activity.waited,
                lambda seconds: fixed_text(seconds, most),
            )
        )
    if activity.moved:
        grids.append(
            _grid((f"Bytes{cell}", "sent to", "no rank sent data to another one"), activity.moved, size_text)
        )
    return grids


def _grid(
    words: tuple[str, str, str], figures: Sequence[Sequence[float]], text: Callable[[float], str]
) -> Grid:
    what, verb, nothing = words
    most = max(figure for row in figures for figure in row)
    if not most:
        return Grid(f"{what}: {nothing}", (), (), ())
    if len(figures) > SIDE:
        pairs = sorted(
            ((figure, i, j) for i, row in enumerate(figures) for j, figure in enumerate(row) if figure),
            key=lambda pair: (-pair[0], *pair[1:]),
        )
        rows = [(f"rank {i}", f"rank {j}", text(figure)) for figure, i, j in pairs[:_LISTED]]
        count = f", the {_LISTED} largest of {len(pairs):,}" if len(pairs) > _LISTED else ""
        return Grid(f"{what}{count}", ("rank", verb, ""), rows, (2,))
    ranks = range(len(figures))
    return Grid(
        f"{what}: row {verb} column",
        ("rank", *(f"rank {rank}" for rank in ranks)),
        [(f"rank {i}", *(text(figures[i][j]) if figures[i][j] else "·" for j in ranks)) for i in ranks],
        [rank + 1 for rank in ranks],
        [[figure / most for figure in row] for row in figures],
    )


NOTHING_YET = "known when a cell has ended"
"""What a fold opens before there is anything."""
NOT_ON_HOSTS = "not known of ranks on several hosts"


@dataclass(frozen=True, slots=True)
class PanelView:
    """The activity of a session at one moment; None: no ranks are running."""

    activity: SessionActivity | None
    """From `Session.activity`."""
    segments: Sequence[SharedSegment] | None = None
    """From `Session.statistics`, the largest first; None: not looked at."""
    note: str = ""
    """A line above."""

    def __repr__(self) -> str:
        return "\n".join(part for part in (self._figures_text(), self._folded_text()) if part)

    def _repr_html_(self) -> str:
        if self.activity is None:
            return self._figures_html()
        return f'{STYLE}{self._figures_html()}<div class="nbp">{details_html(self._folded())}</div>'

    @property
    def changing(self) -> bool:
        """Whether a cell runs, or is about to."""
        return self.activity is not None and self.activity.phase in ("starting", "moving", "running")

    def figures_bundle(self, *, live: bool = True) -> dict[str, str]:
        """Return the output that changes while a cell runs; not `live`: it is the last one."""
        stale = STALE if live and self.changing else ""
        return {"text/plain": self._figures_text(), "text/html": self._figures_html() + stale}

    def folded_bundle(self, identity: str) -> dict[str, str]:
        """Return the output that the folds of `identity` open."""
        return {"text/plain": self._folded_text(), "text/html": folded_html(identity, self._folded())}

    def note_bundle(self) -> dict[str, str]:
        """Return the note alone."""
        return {"text/plain": self.note, "text/html": f'<div class="nbp">{_paragraph(self.note)}</div>'}

    def _figures_text(self) -> str:
        if self.activity is None:
            return NO_RANKS
        parts = (self.note, ranks_text(self.activity), memory_text(self.activity))
        return "\n".join(part for part in parts if part)

    def _figures_html(self) -> str:
        if self.activity is None:
            return f'<div class="nbp">{_paragraph(NO_RANKS)}</div>'
        note = _paragraph(self.note) if self.note else ""
        return f'<div class="nbp">{note}{ranks_html(self.activity)}{memory_html(self.activity)}</div>'

    def _folded(self) -> dict[str, str]:
        if self.activity is None:
            return {}
        empty = NOT_ON_HOSTS if any(rank.host for rank in self.activity.ranks) else NOTHING_YET
        grids = {
            "segments": segment_grids(self.activity, self.segments),
            "matrices": matrix_grids(self.activity),
        }
        return {
            name: "".join(grid.html() for grid in found) or _paragraph(empty) for name, found in grids.items()
        }

    def _folded_text(self) -> str:
        if self.activity is None:
            return ""
        grids = [*segment_grids(self.activity, self.segments), *matrix_grids(self.activity)]
        return "\n\n".join(grid.text() for grid in grids)


def _paragraph(text: str) -> str:
    return f"<p>{escape_html(text)}</p>"
