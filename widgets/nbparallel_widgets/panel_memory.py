"""The memory of a panel: whose part is how large, the arrays in proportion, and the segments."""

from __future__ import annotations

from collections.abc import Sequence

from nbparallel.errors.text.escaping import escape_html
from nbparallel.session.monitoring.activity import SessionActivity
from nbparallel.session.monitoring.segments import SharedSegment, names_text
from nbparallel.sharing.arrays import segments_text
from nbparallel.wire.units import size_text
from nbparallel_widgets.sheet import BLUE, Grid, stacked_bar

SHOWN = 50
"""Segments in the table, the largest first."""
_BOXES = 6
"""Arrays that have a box of their own in the bar."""


def memory_text(activity: SessionActivity, segments: Sequence[SharedSegment] | None) -> str:
    """Return which part of the memory is whose: ``memory: shared 1.6 GiB · ranks' own 0.2 GiB · …``."""
    lines = [f"memory: {' · '.join(_words(activity))}"]
    if boxes := _arrays(activity, segments):
        lines.append("arrays: " + ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes, _ in boxes))
    return "\n".join(lines)


def memory_html(activity: SessionActivity, segments: Sequence[SharedSegment] | None) -> str:
    """Return it as a bar of the whole memory, and below it the arrays in proportion."""
    words = _words(activity)
    parts = _parts(activity)
    said = escape_html(", ".join(words))
    whole = sum(nbytes for _, nbytes, _ in parts)
    bar = stacked_bar(((nbytes / whole, look) for _, nbytes, look in parts), 12, said)
    first, *rest = map(escape_html, words)
    text = f"<b>{first}</b>" + "".join(f" · {part}" for part in rest)
    if not parts:
        return f'<div class="nbp-memory"><span>memory</span><span>{text}</span></div>'
    boxes = _arrays(activity, segments)
    shared = sum(nbytes for _, nbytes, _ in boxes)
    arrays = "".join(
        f'<div style="flex:{1000 * nbytes / (shared or 1):.0f} 1 0" class="nbp-box{" nbp-moves" * moves}" '
        f'title="{escape_html(name)} {size_text(nbytes)}"><i></i>{escape_html(name)} '
        f"{size_text(nbytes)}</div>"
        for name, nbytes, moves in boxes
    )
    return (
        f'<div class="nbp-memory"><span>memory</span><div>{bar}</div><span></span><span>{text}</span>'
        + (f'<span>arrays</span><div class="nbp-boxes">{arrays}</div>' if arrays else "")
        + "</div>"
    )


def _parts(activity: SessionActivity) -> list[tuple[str, int, str]]:
    """Return whose part of the memory is how large, what is free last; empty: the system does not say."""
    whole, limit = activity.memory_nbytes, activity.limit_nbytes
    if whole is None or limit is None:
        return []
    shared = activity.nbytes + activity.pooled_nbytes
    own = sum(rank.private_nbytes for rank in activity.ranks)
    free = max(0, limit - shared)
    return [
        ("shared", activity.nbytes, f'fill="{BLUE}"'),
        ("kept for the next arrays", activity.pooled_nbytes, f'fill="{BLUE}" fill-opacity="0.6"'),
        (f"{activity.member}s' own", own, f'fill="{BLUE}" fill-opacity="0.35"'),
        ("other programs", max(0, whole - free - shared - own), 'fill="currentColor" fill-opacity="0.3"'),
        ("free", free, 'fill="currentColor" fill-opacity="0.08"'),
    ]


def _words(activity: SessionActivity) -> list[str]:
    parts = _parts(activity)
    named = [f"{name} {size_text(nbytes)}" for name, nbytes, _ in parts if nbytes or name == "shared"]
    if not parts:
        limit = activity.limit_nbytes
        named = [
            f"shared {size_text(activity.nbytes)}" + ("" if limit is None else f" of {size_text(limit)}")
        ]
    else:
        named[-1] += f" of {size_text(activity.memory_nbytes or 0)}"
    return [*named, activity.strategy, segments_text(activity.segments)]


def _arrays(
    activity: SessionActivity, segments: Sequence[SharedSegment] | None
) -> list[tuple[str, int, bool]]:
    """Return name and bytes of the largest arrays and of the others, and of one that is on its way."""
    found = [(names_text(segment.names), segment.nbytes, False) for segment in segments or ()]
    rest = found[_BOXES:]
    if rest:
        found[_BOXES:] = [(f"{len(rest):,} others", sum(nbytes for _, nbytes, _ in rest), False)]
    if activity.phase == "moving":
        found.insert(0, (f"{activity.moving_name}, on its way", activity.moving_nbytes, True))
    return found


def segment_grids(activity: SessionActivity, segments: Sequence[SharedSegment] | None) -> list[Grid]:
    """Return a table of the segments, and one of what each rank has; None: the segments are not known."""
    grids = []
    if segments is not None:
        grids.append(
            Grid(
                f"Shared memory: {segments_text(len(segments))}" + _hidden(segments),
                ("names", "size", "strategy", "used by", "made by"),
                [
                    (
                        names_text(segment.names),
                        size_text(segment.nbytes),
                        segment.strategy or "?",
                        segment.users or "no process any more",
                        segment.maker,
                    )
                    for segment in segments[:SHOWN]
                ],
            )
        )
    if any(rank.private_nbytes or rank.mapped_nbytes for rank in activity.ranks):
        rows = [
            (
                f"{activity.member} {rank.rank}",
                size_text(rank.private_nbytes),
                size_text(rank.mapped_nbytes),
                size_text(rank.shared_nbytes),
                "-" if rank.operations is None else f"{rank.operations:,}",
            )
            for rank in activity.ranks
            if rank.state not in ("dead", "starting", "unseen")
        ]
        head = (activity.member, "own memory", "shared, touched", "shared, made", "operations")
        grids.append(Grid(f"Memory of each {activity.member}", head, rows))
    return grids


def _hidden(segments: Sequence[SharedSegment]) -> str:
    if len(segments) <= SHOWN:
        return ""
    rest = sum(segment.nbytes for segment in segments[SHOWN:])
    return f", the largest {SHOWN} here, the others {size_text(rest)}"
