"""A table whose numbers are aligned at the right, as text and as HTML; its cells may be shaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbparallel.errors.text.escaping import escape_html
from nbparallel.errors.text.table import Table
from nbparallel_widgets.palette import VERMILLION


@dataclass(frozen=True, slots=True)
class Grid:
    """A caption, a head and rows; the first cell of a row names it."""

    caption: str
    """One line."""
    head: tuple[str, ...]
    """Names of the columns."""
    rows: Sequence[tuple[str, ...]]
    """As many cells as the head has."""
    shades: Sequence[Sequence[float]] = ()
    """How dark each cell is, 0 to 1, without the first of each row; empty: none is."""

    def text(self) -> str:
        """Return the table in columns of text."""
        return Table(self.caption, self.head, self.rows).text()

    def html(self) -> str:
        """Return the table; a wide one scrolls inside its place.  Without rows: the caption."""
        caption = escape_html(self.caption)
        if not self.rows:
            return f"<p>{caption}</p>"
        numbers = Table("", self.head, self.rows).numbers()
        side = [' class="nbp-n"' * (i in numbers) for i in range(len(self.head))]
        head = "".join(
            f'<th scope="col"{where}>{escape_html(name)}</th>'
            for where, name in zip(side, self.head, strict=True)
        )
        rows = "".join(
            f'<tr><th scope="row"{side[0]}>{escape_html(row[0])}</th>'
            + "".join(
                f"<td{side[x]}{self._shade(y, x)}>{escape_html(row[x])}</td>" for x in range(1, len(row))
            )
            + "</tr>"
            for y, row in enumerate(self.rows)
        )
        return (
            f'<div class="nbp-scroll" role="group" aria-label="{caption}" tabindex="0">'
            f'<table class="nbp-grid"><caption>{caption}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def _shade(self, y: int, x: int) -> str:
        dark = self.shades[y][x - 1] if self.shades else 0.0
        # on light and on dark: text keeps its contrast up to a third of the colour
        return f' style="background:{VERMILLION}{round(84 * dark):02x}"' if dark > 0.02 else ""
