"""A snapshot of a session's activity, as text and as HTML without scripts or style sheets."""

from __future__ import annotations

import html
from dataclasses import dataclass

from nbparallel.errors import NO_RANKS, rank_list
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.session.monitoring.timeline import COMPUTING, WAITING
from nbparallel.table import Table
from nbparallel.wire.units import seconds_text, size_text
from nbparallel_widgets.timeline_svg import COLOURS

_HEAD = ("rank", "state", "computing", "waiting", "operations")
_BAR = 72
"""Width of the bar that shows how much of a rank's time it waited."""
_CELL = "text-align:left;padding:1px 12px 1px 0;white-space:nowrap;font-variant-numeric:tabular-nums"


@dataclass(frozen=True, slots=True)
class PanelView:
    """The activity of a session at one moment; None: no ranks are running."""

    activity: SessionActivity | None
    """From `Session.activity`."""

    def __repr__(self) -> str:
        if self.activity is None:
            return NO_RANKS
        rows = [_cells(rank) for rank in self.activity.ranks]
        return Table(title(self.activity), _HEAD, rows, memory(self.activity)).text()

    def _repr_html_(self) -> str:
        if self.activity is None:
            return f"<div>{html.escape(NO_RANKS)}</div>"
        head = "".join(
            f'<th scope="col" style="{_CELL}">{_keyed(name)}</th>' for name in ("", *_HEAD[1:], "")
        )
        rows = "".join(_row(rank) for rank in self.activity.ranks)
        return (
            '<div style="color:inherit;line-height:1.5"><table style="border-collapse:collapse">'
            f'<caption style="{_CELL};caption-side:top;color:inherit"><b>'
            f"{html.escape(title(self.activity))}</b></caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f"<div>{html.escape(memory(self.activity))}</div></div>"
        )


def title(activity: SessionActivity) -> str:
    """Return what runs: ``In[3] runs on ranks 0-3, for 1.3 s``."""
    took_part = [
        rank.rank for rank in activity.ranks if rank.computing or rank.waiting or rank.state == "dead"
    ]
    ranks = rank_list(took_part or [rank.rank for rank in activity.ranks])
    if not activity.running and not activity.seconds:
        return f"{ranks}: no cell has run yet"
    what = f"In[{activity.number}]" if activity.number else "a call"
    if activity.running:
        return f"{what} runs on {ranks}, for {_calm(activity.seconds)}"
    return f"{what} took {seconds_text(activity.seconds)} on {ranks}"


def memory(activity: SessionActivity) -> str:
    """Return the strategy and the shared memory."""
    count = f"{activity.segments:,} segment{'s' * (activity.segments != 1)}"
    text = f"shared memory ({activity.strategy}): {size_text(activity.nbytes)} in {count}"
    kept = activity.pooled_nbytes
    return text + (f", {size_text(kept)} more kept for the next arrays" if kept else "")


def state(rank: RankActivity) -> str:
    """Return what a rank does: ``waiting in all_reduce for rank 2, line 3, for 1.2 s``."""
    if rank.state == "dead":
        how = rank.operation.partition(":")[0].removeprefix("was ")
        return f"dead: {how}; the next cell starts it again"
    text = rank.state
    if rank.operation:
        text += f" in {rank.operation}"
    if rank.waits_for:
        text += f" for {rank_list(rank.waits_for)}"
    if rank.line:
        text += f", line {rank.line}"
    return text + (f", for {_calm(rank.seconds)}" if rank.seconds >= 0.1 else "")


def _calm(seconds: float) -> str:
    """Return a span that grows while it is shown: its digits stay in their places."""
    if seconds < 1:
        return seconds_text(seconds)
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _cells(rank: RankActivity) -> tuple[str, ...]:
    took_part = bool(rank.computing or rank.waiting)
    return (
        str(rank.rank),
        state(rank),
        _calm(rank.computing) if took_part else "-",
        _calm(rank.waiting) if took_part else "-",
        f"{rank.operations:,}" if took_part else "-",
    )


def _row(rank: RankActivity) -> str:
    number, what, *figures = (html.escape(cell) for cell in _cells(rank))
    mark = f'<span style="color:{_MARKS[rank.state][1]}" aria-hidden="true">{_MARKS[rank.state][0]}</span>'
    first = f'<th scope="row" style="{_CELL}">rank {number}</th>'
    cells = [f'<td style="{_CELL};min-width:16em;white-space:normal">{mark} {what}</td>']
    cells += [f'<td style="{_CELL}">{figure}</td>' for figure in figures]
    cells.append(f'<td style="{_CELL}">{_bar(rank)}</td>')
    return f"<tr>{first}{''.join(cells)}</tr>"


_MARKS = {
    "idle": ("○", "inherit"),
    "computing": ("▶", COLOURS[COMPUTING]),
    "waiting": ("◔", COLOURS[WAITING]),
    "dead": ("✕", "inherit"),
}


def _keyed(name: str) -> str:
    """Return a column's name, with the colour that its times have in the bars."""
    if name not in COLOURS:
        return name
    return f'{name} <span style="color:{COLOURS[name]}" aria-hidden="true">■</span>'


def _bar(rank: RankActivity) -> str:
    whole = rank.computing + rank.waiting
    if not whole:
        return ""
    wide = _BAR * rank.computing / whole
    about = f"{100 * rank.computing / whole:.0f} % computing, {100 * rank.waiting / whole:.0f} % waiting"
    return (
        f'<svg role="img" aria-label="{about}" viewBox="0 0 {_BAR} 12" width="{_BAR}" height="12" '
        f'style="width:{_BAR}px;max-width:none;height:12px"><title>{about}</title>'
        f'<rect width="{wide:.1f}" height="12" fill="{COLOURS[COMPUTING]}"/>'
        f'<rect x="{wide:.1f}" y="4" width="{_BAR - wide:.1f}" height="4" fill="{COLOURS[WAITING]}"/></svg>'
    )
