"""The memory of a panel: how much is shared of how much, each rank's own, and the segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbparallel.errors import rank_list
from nbparallel.errors.text.escaping import escape_html
from nbparallel.wire.units import size_text
from nbparallel_widgets.panel_grid import Grid

if TYPE_CHECKING:  # the magics need `used_by` when they are loaded
    from nbparallel.session.monitoring.activity import SessionActivity
    from nbparallel.session.monitoring.segments import SharedSegment

SHOWN = 50
"""Segments in the table, the largest first."""
NO_NAME = "no name"
_NAMES = 4
"""Names that are shown of one segment."""
_COLOUR = "#0072B2"
_LEAST = 0.6
"""Width of the bar of a little, in percent."""


def memory_text(activity: SessionActivity) -> str:
    """Return what is shared: ``shared memory: 153.6 MiB of 20.7 GiB · file_descriptor · 3 segments``."""
    return f"shared memory: {_share(activity)}{_more(activity)}"


def memory_html(activity: SessionActivity) -> str:
    """Return it with a bar."""
    share, limit = _share(activity), activity.limit_nbytes
    bar = ""
    if limit:
        width = min(100.0, max(_LEAST * bool(activity.nbytes), 100 * activity.nbytes / limit))
        bar = (
            f'<svg role="img" aria-label="{escape_html(share)}" width="100%" height="10" '
            'style="display:block;width:100%;height:10px">'
            '<rect width="100%" height="10" fill="currentColor" fill-opacity="0.15"/>'
            f'<rect width="{width:.2f}%" height="10" fill="{_COLOUR}"/></svg>'
        )
    return (
        f'<div class="nbp-memory"><span>shared memory</span>{bar and f"<div>{bar}</div>"}'
        f"<span><b>{escape_html(share)}</b>{escape_html(_more(activity))}</span></div>"
    )


def segment_grids(activity: SessionActivity, segments: Sequence[SharedSegment] | None) -> list[Grid]:
    """Return a table of the segments, and one of what each rank has; None: the segments are not known."""
    grids = []
    if segments is not None:
        grids.append(
            Grid(
                f"Shared memory: {_count(len(segments))}" + _hidden(segments),
                ("names", "size", "strategy", "used by", "made by"),
                [
                    (
                        _names(segment.names),
                        size_text(segment.nbytes),
                        segment.strategy or "?",
                        used_by(segment) or "no process any more",
                        segment.maker,
                    )
                    for segment in segments[:SHOWN]
                ],
                right=(1,),
            )
        )
    if any(rank.private_nbytes or rank.mapped_nbytes for rank in activity.ranks):
        rows = [
            (
                f"rank {rank.rank}",
                size_text(rank.private_nbytes),
                size_text(rank.mapped_nbytes),
                size_text(rank.shared_nbytes),
                "-" if rank.operations is None else f"{rank.operations:,}",
            )
            for rank in activity.ranks
            if rank.state not in ("dead", "starting", "unseen")
        ]
        head = ("rank", "own memory", "shared, touched", "shared, made", "operations")
        grids.append(Grid("Memory of each rank", head, rows, right=(1, 2, 3, 4)))
    return grids


def used_by(segment: SharedSegment) -> str:
    """Return which processes use a segment: ``notebook, ranks 0-3``."""
    users = ["notebook"] if segment.notebook else []
    return ", ".join([*users, *([rank_list(segment.ranks)] if segment.ranks else [])])


def _share(activity: SessionActivity) -> str:
    limit = "" if activity.limit_nbytes is None else f" of {size_text(activity.limit_nbytes)}"
    return f"{size_text(activity.nbytes)}{limit} · {activity.strategy}"


def _more(activity: SessionActivity) -> str:
    kept = activity.pooled_nbytes
    return f" · {_count(activity.segments)}" + (
        f" · {size_text(kept)} more kept for the next arrays" if kept else ""
    )


def _count(segments: int) -> str:
    return f"{segments:,} segment{'s' * (segments != 1)}"


def _hidden(segments: Sequence[SharedSegment]) -> str:
    if len(segments) <= SHOWN:
        return ""
    rest = sum(segment.nbytes for segment in segments[SHOWN:])
    return f", the largest {SHOWN} here, the others {size_text(rest)}"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more or NO_NAME
