"""Tables whose numbers are aligned at the right, as text and as HTML; their cells may be shaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbparallel.errors.text.escaping import escape_html
from nbparallel.errors.text.table import Table
from nbparallel.session.monitoring.activity import SessionActivity
from nbparallel.wire.units import size_text
from nbparallel_widgets.timeline_text import fixed_text


@dataclass(frozen=True, slots=True)
class Grid:
    """A caption, a head and rows; the first cell of a row names it."""

    caption: str
    """One line."""
    head: tuple[str, ...]
    """Names of the columns."""
    rows: Sequence[tuple[str, ...]]
    """As many cells as the head has."""
    right: Sequence[int]
    """Columns of numbers."""
    shades: Sequence[Sequence[float]] = ()
    """How dark each cell is, 0 to 1, without the first of each row; empty: none is."""

    def text(self) -> str:
        """Return the table in columns of text."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        head, *rows = (
            tuple(cell.rjust(widths[i]) if i in self.right else cell for i, cell in enumerate(line))
            for line in lines
        )
        return Table(self.caption, head, rows).text()

    def html(self) -> str:
        """Return the table; a wide one scrolls inside its place.  Without rows: the caption."""
        caption = escape_html(self.caption)
        if not self.rows:
            return f"<p>{caption}</p>"
        head = "".join(
            f'<th scope="col"{self._side(i)}>{escape_html(name)}</th>' for i, name in enumerate(self.head)
        )
        rows = "".join(
            f'<tr><th scope="row"{self._side(0)}>{escape_html(row[0])}</th>'
            + "".join(self._cell(cell, y, x) for x, cell in enumerate(row[1:], start=1))
            + "</tr>"
            for y, row in enumerate(self.rows)
        )
        return (
            f'<div class="nbp-scroll" role="group" aria-label="{caption}" tabindex="0">'
            f'<table class="nbp-grid"><caption>{caption}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def _cell(self, cell: str, y: int, x: int) -> str:
        dark = self.shades[y][x - 1] if self.shades else 0.0
        # on light and on dark: text keeps its contrast up to a third of the colour
        shade = f' style="background:rgba(213,94,0,{0.33 * dark:.2f})"' if dark > 0.02 else ""
        return f"<td{self._side(x)}{shade}>{escape_html(cell)}</td>"

    def _side(self, column: int) -> str:
        return ' class="nbp-n"' if column in self.right else ""


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
