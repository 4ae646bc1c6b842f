"""A table whose numbers are aligned at the right, as text and as HTML; its cells may be shaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbparallel.errors.text.escaping import escape_html
from nbparallel.errors.text.table import Table


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
