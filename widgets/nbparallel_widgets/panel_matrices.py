"""Which rank waited for which, and which sent how much to which: two small tables, ranks by ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbparallel.session.monitoring.activity import SessionActivity
from nbparallel.wire.units import size_text
from nbparallel_widgets.panel_grid import Grid
from nbparallel_widgets.times import fixed_text

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
