"""A session's activity as it is shown: as text, and as HTML without scripts.

A verdict, from sums since the cell began; a row for each rank, with its course in true order; memory; folds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nbparallel.errors import NO_RANKS, grouped, rank_list
from nbparallel.errors.text.escaping import escape_html
from nbparallel.errors.text.table import Table
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.session.monitoring.segments import SharedSegment
from nbparallel.session.monitoring.timeline import WAITING
from nbparallel.wire.units import size_text
from nbparallel_widgets.panel_course import (
    Course,
    marked_ranks,
    progress,
    ranks_text,
    spent,
    took_part,
    verdict,
    when,
)
from nbparallel_widgets.panel_memory import memory_html, memory_text, segment_grids
from nbparallel_widgets.sheet import (
    HEIGHT,
    KINDS,
    LETTERS,
    STYLE,
    WIDTH,
    Grid,
    areas,
    details_html,
    folded_html,
    host_bodies,
    letters,
    share_bar,
    strip,
    swatch,
)
from nbparallel_widgets.timeline_view import fixed_text, next_round

_CODE = re.compile(r"`(.+?)`")

# The ranks: a strip for each, in true order; its shares; and what stands out of what it does.

SHOWN = 64
"""Ranks in the table; of more, those that are not shown are counted below it."""
BOXES = 60
"""Items of a rank of which each has a box; of more, each piece of the strip."""
MOST_LINES = 2
"""Lines about what ranks do now."""
LETTERS_WIDE = 24
"""Letters of a strip in text."""
_OWN = "own memory"
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
_STATES = {
    "moving": "moving data",
    "idle": "finished",
    "released": "stopped, because another rank failed",
}


def axis_end(activity: SessionActivity) -> float:
    """Return the seconds at which all strips end: round, so that they grow steadily and stay when it ends."""
    longest = max([activity.seconds, *map(spent, activity.ranks)])
    return next_round(max(longest, 1.0) if activity.running else longest) if longest else 0.0


def shown_ranks(activity: SessionActivity, marked: frozenset[int]) -> tuple[RankActivity, ...]:
    """Return the ranks that have a row, in order: all, or the most important ones."""
    if len(activity.ranks) <= SHOWN:
        return activity.ranks
    by_importance = sorted(
        activity.ranks, key=lambda rank: (rank.rank not in marked, _IMPORTANT.index(rank.state), rank.rank)
    )
    return tuple(sorted(by_importance[:SHOWN], key=lambda rank: rank.rank))


def state_text(rank: RankActivity, activity: SessionActivity) -> str:
    """Return what a rank does: ``waiting for rank 2 in all_reduce, line 3``."""
    if rank.state == "unseen":
        return rank.operation
    if rank.state == "dead":
        return "dead: the next cell starts it again, without its variables"
    if rank.state == "idle":
        if activity.phase not in ("finished", "failed", "interrupted"):
            return "idle"
        if not took_part(rank):
            return "took no part"
    text = _STATES.get(rank.state, rank.state)
    if rank.state == "waiting" and rank.waits_for:
        text += f" for {rank_list(rank.waits_for)}"
    if rank.operation and rank.state in ("waiting", "moving"):
        text += f" in {rank.operation}"
    if rank.rank == activity.failed_rank and activity.failed_line:
        text += f", line {activity.failed_line}"
    elif rank.line and rank.state != "finished":
        loop = rank.last_line > rank.line
        text += f", lines {rank.line}-{rank.last_line}" if loop else f", line {rank.line}"
    return text


def states(activity: SessionActivity, apart: frozenset[int]) -> list[str]:
    """Return what ranks do now, equal states in one line: ``ranks 0-1, 3: waiting for rank 2, line 5``."""
    groups = grouped(
        (state_text(rank, activity), rank)
        for rank in sorted(activity.ranks, key=lambda rank: (_IMPORTANT.index(rank.state), rank.rank))
        if rank.rank not in apart or rank.state in ("idle", "finished")
    )
    lines = [
        f"{ranks_text(ranks).replace('rank', activity.member)}: {text}{_after(ranks, activity)}"
        for text, ranks in groups.items()
    ]
    rest = sum(len(ranks) for ranks in list(groups.values())[MOST_LINES:])
    return lines[:MOST_LINES] + ([f"and {rest} more {activity.member}s in other places"] if rest else [])


def _after(ranks: Sequence[RankActivity], activity: SessionActivity) -> str:
    """Return when ranks had finished; empty: they have not."""
    times = sorted(rank.finished for rank in ranks if rank.state in ("idle", "finished"))
    if not times or not times[0]:
        return ""
    first, last = (fixed_text(time, max(activity.seconds, times[-1])) for time in (times[0], times[-1]))
    return f" after {first}" + (f" to {last}" if first != last else "")


def own_text(rank: RankActivity, activity: SessionActivity, course: Course, *, marked: bool) -> str:
    """Return what stands in the row of a rank; what it shares with others stands below the rows."""
    if rank.item >= 0 and rank.state == "computing":
        seconds = course.item_seconds(rank.rank, activity.seconds)
        return f"item {rank.item}" + (f", for {seconds:.1f} s" if seconds >= 1 else "")
    if not marked or rank.state in ("idle", "finished"):
        return f"step {rank.step:,} of {rank.steps:,}" if rank.step < rank.steps else ""
    rank = replace(rank, line=rank.inside, last_line=0) if rank.inside else rank
    return state_text(rank, activity).removeprefix(f"{rank.state}: ").removeprefix(f"{rank.state}, ")


def chip(rank: RankActivity, activity: SessionActivity) -> str:
    """Return the few words that mark a row."""
    if rank.state in ("failed", "dead"):
        return rank.state
    if activity.phase == "failed":
        return (
            "failed" if rank.rank == activity.failed_rank and not activity.failed_between else "left it out"
        )
    waiting = sum(other.state == "waiting" for other in activity.ranks)
    if not activity.running:
        return "the others waited"
    return (
        f"{waiting} rank{'s' * (waiting != 1)} wait{'s' * (waiting == 1)}" if waiting else "often waited for"
    )


def _shares(rank: RankActivity) -> dict[str, float]:
    """Return what share of its time a rank did what; empty: it took no part."""
    whole = spent(rank)
    times = (rank.computing, rank.waiting, rank.moving)
    return {kind: time / whole for kind, time in zip(KINDS, times, strict=True)} if whole else {}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _own_memory(rank: RankActivity) -> str:
    return size_text(rank.private_nbytes) if rank.private_nbytes else "-"


def _hidden(activity: SessionActivity, shown: Sequence[RankActivity]) -> list[str]:
    """Return a line about ranks that have no row."""
    hidden = set(activity.ranks) - set(shown) if len(shown) < len(activity.ranks) else ()
    counts = {state: sum(rank.state == state for rank in hidden) for state in _IMPORTANT}
    text = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    return [f"… and {len(hidden):,} more {activity.member}s: {text}"] if hidden else []


# As text.


def table_text(activity: SessionActivity, course: Course, title: str) -> str:
    """Return the sentence and the table in letters."""
    end, marked = axis_end(activity), marked_ranks(activity, course)
    shown = shown_ranks(activity, marked)
    head = (activity.member, LETTERS_WIDE * " ", *(f"{LETTERS[kind]} {kind}" for kind in KINDS), _OWN, "now")
    rows = [
        (
            f"{'▶' if rank.rank in marked else ' '} {rank.rank}",
            f"|{_letters(rank, course, end)}|",
            *(_percent(_shares(rank).get(kind)) for kind in KINDS),
            _own_memory(rank),
            "; ".join(
                [
                    own_text(rank, activity, course, marked=rank.rank in marked),
                    *[chip(rank, activity)] * (rank.rank in marked),
                ]
            ).strip("; "),
        )
        for rank in shown
    ]
    first = 0
    for host, ranks in grouped((rank.host, rank) for rank in shown).items():
        if host:
            rows.insert(first, (f"host {host}", *[""] * (len(head) - 1)))
        first += len(ranks) + 1
    axis = [f"the strips end at {end:g} s"] * bool(end)
    foot = [*axis, *_hidden(activity, shown), *states(activity, marked)]
    above = " · ".join(part for part in (when(activity), progress(activity, course)) if part)
    return "\n".join([title, *[above] * bool(above), Table("", head, rows, "\n".join(foot)).text()])


def _letters(rank: RankActivity, course: Course, end: float) -> str:
    pieces = (
        (
            s.begin,
            s.end,
            {kind: seconds / (s.end - s.begin) for kind, seconds in zip(KINDS, s[2:5], strict=True)},
        )
        for s in course.stretches(rank.rank)
        if s.end > s.begin
    )
    return letters(pieces, end, LETTERS_WIDE)


# As HTML.


def table_html(activity: SessionActivity, course: Course, title: str, stale: str) -> str:
    """Return the sentence and the table; `stale`: what takes the sentence's place when no news come."""
    end, marked = axis_end(activity), marked_ranks(activity, course)
    shown = shown_ranks(activity, marked)
    bad = activity.phase == "failed" or any(
        rank.state in ("failed", "dead") and took_part(rank) for rank in activity.ranks
    )
    said = _CODE.sub(r"<code>\1</code>", escape_html(title))
    key = "".join(f"<span>{swatch(kind)}{kind}</span>" for kind in KINDS)
    done = ""
    if activity.items > 0:
        width = 100 * sum(rank.items for rank in activity.ranks) / activity.items
        done = f'<div class="nbp-done"><div style="width:{width:.1f}%"></div></div>'
    groups = grouped((rank.host, rank) for rank in shown).items()
    rows = host_bodies(
        {
            host: [_row(rank, activity, course, end, (rank.rank in marked, bad)) for rank in ranks]
            for host, ranks in groups
        }
    )
    axis = f"<span>0</span><span>{end:g} s</span>" if end else "time"
    lines = [*_hidden(activity, shown), *states(activity, marked)]
    return (
        f'<table class="nbp-ranks"><caption><div class="nbp-head"><b class="nbp-title{" nbp-bad" * bad}" '
        f'role="status">{said}</b>{stale}<small>{escape_html(when(activity))}</small></div>{done}'
        f'<div class="nbp-more"><span>{escape_html(progress(activity, course))}</span>{key}</div></caption>'
        f'<thead><tr><th scope="col" class="nbp-rank">{activity.member}</th>'
        f'<th scope="col" class="nbp-bar">{axis}</th>'
        f'<th scope="col" class="nbp-share">{"done" if activity.items else "share of the cell"}</th>'
        f'<th scope="col" class="nbp-n">{WAITING}</th><th scope="col" class="nbp-n nbp-own">{_OWN}</th>'
        f'<th scope="col" class="nbp-state">now</th></tr></thead>'
        f"{rows}</table>"
        f'<div class="nbp-now">{"".join(f"<p>{escape_html(line)}</p>" for line in lines)}</div>'
    )


def _row(
    rank: RankActivity, activity: SessionActivity, course: Course, end: float, marks: tuple[bool, bool]
) -> str:
    marked, bad = marks
    kind = f' class="nbp-{"wrong" if bad else "hot"}"' if marked else ""
    shares = _shares(rank)
    now = escape_html(own_text(rank, activity, course, marked=marked))
    if marked:
        now += f' <span class="nbp-chip">{chip(rank, activity)}</span>'
    return (
        f'<tr{kind}><th scope="row" class="nbp-rank">{activity.member} {rank.rank}</th>'
        f'<td class="nbp-bar">{_strip(rank, activity, course, end, marked and bad)}</td>'
        f'<td class="nbp-share">{f"{rank.items:,}" if activity.items else share_bar(shares)}</td>'
        f'<td class="nbp-n">{_percent(shares.get(WAITING))}</td>'
        f'<td class="nbp-n nbp-own">{_own_memory(rank)}</td><td class="nbp-state">{now}</td></tr>'
    )


def _strip(rank: RankActivity, activity: SessionActivity, course: Course, end: float, wrong: bool) -> str:
    stretches = course.stretches(rank.rank)
    times = ", ".join(f"{kind} {_percent(share)}" for kind, share in _shares(rank).items())
    ends = (
        s.begin + (s.end - s.begin) * (i + 1) / s.items
        for s in stretches
        for i in range(0 if rank.items <= BOXES else s.items - 1, s.items)
    )
    cuts = "".join(f"M{WIDTH * x / end:.1f} 0v{HEIGHT}" for x in ends)
    marks = f'<path d="{cuts}" class="nbp-cut"/>' if cuts else ""
    if wrong and end:
        x = min(WIDTH * spent(rank) / end, WIDTH - 8)
        marks += f'<path d="M{x:.0f} 0h8v14h-8z" class="nbp-x"/>'
    about = f"{activity.member} {rank.rank}: {times or 'it took no part'}"
    return strip(about, "".join(areas(stretches, end)) + marks)


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
        return Grid(f"{what}: {nothing}", (), ())
    if len(figures) > SIDE:
        pairs = sorted(
            ((figure, i, j) for i, row in enumerate(figures) for j, figure in enumerate(row) if figure),
            key=lambda pair: (-pair[0], *pair[1:]),
        )
        rows = [(f"rank {i}", f"rank {j}", text(figure)) for figure, i, j in pairs[:_LISTED]]
        count = f", the {_LISTED} largest of {len(pairs):,}" if len(pairs) > _LISTED else ""
        return Grid(f"{what}{count}", ("rank", verb, ""), rows)
    ranks = range(len(figures))
    return Grid(
        f"{what}: row {verb} column",
        ("rank", *(f"rank {rank}" for rank in ranks)),
        [(f"rank {i}", *(text(figures[i][j]) if figures[i][j] else "·" for j in ranks)) for i in ranks],
        shades=[[figure / most for figure in row] for row in figures],
    )


NOTHING_YET = "known when a cell has ended"
"""What a fold opens before there is anything."""
NOT_ON_HOSTS = "not known of ranks on several hosts"
_STALE = (
    '<b class="nbp-stale">no news since {}: the page was loaded again, or the kernel restarted; '
    "<code>%parallel_panel</code> shows it as it is</b>"
)
"""In the sentence's place, by the style sheet, if figures of a cell that runs stand still for 5 s."""


@dataclass(frozen=True, slots=True)
class PanelView:
    """The activity of a session at one moment; None: no ranks are running."""

    activity: SessionActivity | None
    """From `Session.activity`."""
    segments: Sequence[SharedSegment] | None = None
    """From `Session.statistics`, the largest first; None: not looked at."""
    note: str = ""
    """A line above."""
    course: Course = field(default_factory=Course)
    """What was seen of the cell so far."""
    as_of: str = ""
    """The time of day, ``17:31:54``."""

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
        """Return the output that changes while a cell runs; not `live`: it is the last one.

        The text of one that changes is its sentence: no front end follows the text, and each look costs.
        """
        live = live and self.changing and not self.note
        return {"text/plain": self._figures_text(brief=live), "text/html": self._figures_html(live=live)}

    def folded_bundle(self, identity: str) -> dict[str, str]:
        """Return the output that the folds of `identity` open."""
        return {"text/plain": self._folded_text(), "text/html": folded_html(identity, self._folded())}

    def _seen(self) -> tuple[SessionActivity, Course, str]:
        """Return the activity, what was seen of this cell, at least now, and the sentence about it.

        While the next cell is being prepared the activity is without what the last one did.
        """
        assert self.activity is not None
        activity, course = self.activity, self.course
        if activity.phase in ("starting", "moving"):
            ranks = [
                replace(
                    rank,
                    state=rank.state if rank.state in ("starting", "dead") else "idle",
                    computing=0.0,
                    waiting=0.0,
                    moving=0.0,
                    finished=0.0,
                    item=-1,
                    items=0,
                )
                for rank in activity.ranks
            ]
            activity = replace(activity, seconds=0.0, items=0, ranks=tuple(ranks))
        if not (activity.seconds and course.began_ns == activity.began_ns and course.started):
            course = Course(activity.began_ns)
            course.add(activity)
        return activity, course, course.steady(verdict(activity, course), activity)

    def _figures_text(self, *, brief: bool = False) -> str:
        if self.activity is None:
            return self.note or NO_RANKS
        activity, course, title = self._seen()
        as_of = f"as of {self.as_of}" if self.as_of else ""
        if brief:
            return f"{title}\n{as_of}"
        memory = memory_text(activity, self.segments)
        return "\n".join(
            part for part in (self.note, table_text(activity, course, title), memory, as_of) if part
        )

    def _figures_html(self, *, live: bool = False) -> str:
        if self.activity is None:
            return f'<div class="nbp">{_paragraph(self.note or NO_RANKS)}</div>'
        activity, course, title = self._seen()
        note = _paragraph(self.note) if self.note else ""
        stale = _STALE.format(self.as_of) if live else ""
        as_of = f'<p class="nbp-as-of">as of {self.as_of}</p>' if self.as_of else ""
        return (
            f'<div class="nbp nbp-card{" nbp-live" * live}">{note}'
            f"{table_html(activity, course, title, stale)}{memory_html(activity, self.segments)}{as_of}</div>"
        )

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
