"""A small table, as text and as HTML that takes its colours from the notebook's theme."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a head, rows, and a line below."""

    title: str
    """One line."""
    head: tuple[str, ...]
    """Names of the columns."""
    rows: Sequence[tuple[str, ...]]
    """As many cells as the head has."""
    foot: str = ""
    """One line."""

    def without_empty_columns(self) -> Table:
        """Return the table without columns in which nothing stands."""
        used = [i for i in range(len(self.head)) if any(row[i] for row in self.rows)]
        rows = [tuple(row[i] for i in used) for row in self.rows]
        return Table(self.title, tuple(self.head[i] for i in used), rows, self.foot)

    def text(self) -> str:
        """Return the table in columns of text."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        ]
        return "\n".join(part.rstrip() for part in (self.title, *body, self.foot) if part)

    def html(self) -> str:
        """Return a plain table: no colour of its own, so that dark themes need nothing."""
        head = "".join(f'<th scope="col" style="text-align:left">{html.escape(c)}</th>' for c in self.head)
        rows = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{html.escape(c)}</td>' for c in row) + "</tr>"
            for row in self.rows
        )
        foot = f"<p>{html.escape(self.foot)}</p>" if self.foot else ""
        caption = f'<caption style="text-align:left">{html.escape(self.title)}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{foot}"
