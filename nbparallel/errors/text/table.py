"""A small table, as text and as HTML that takes its colours from the notebook's theme."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from nbparallel.errors.text.escaping import escape_html, visible

_LEFT = ' style="padding:.2em .6em;text-align:left"'
_NUMBER = ' style="padding:.2em .6em;text-align:left;white-space:nowrap"'
_SENTENCE = ' style="padding:.2em .6em;text-align:left;min-width:14em"'

_LONGEST_NUMBER = 16
"""Characters of a number with its unit, or of a segment's id."""
_SHORTEST_SENTENCE = 28
"""Characters."""


class TableView:
    """Base of what is shown as its table: as text in a terminal, as HTML in a notebook."""

    __slots__ = ()

    @abstractmethod
    def table(self) -> Table:
        """Return what is shown."""

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


@dataclass(frozen=True, slots=True, repr=False)
class Table(TableView):
    """A title, a head, rows, and what stands below them."""

    title: str
    """One line."""
    head: tuple[str, ...]
    """Names of the columns."""
    rows: Sequence[tuple[str, ...]]
    """As many cells as the head has, of one line or several; the first one names its row."""
    foot: str = ""
    """Lines."""

    def table(self) -> Table:
        """Return it, as it is shown."""
        return self

    def without_empty_columns(self) -> Table:
        """Return the table without its empty columns."""
        used = [i for i in range(len(self.head)) if any(row[i] for row in self.rows)]
        rows = [tuple(row[i] for i in used) for row in self.rows]
        return Table(self.title, tuple(self.head[i] for i in used), rows, self.foot)

    def text(self) -> str:
        """Return the table in columns of text; nothing but title and foot if there are no rows."""
        lines = [self.head, *(line for row in self.rows for line in _lines(row))] if self.rows else []
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))] if lines else []
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        ]
        return "\n".join(visible(part).rstrip() for part in (self.title, *body, self.foot) if part)

    def html(self) -> str:
        """Return a plain table: without colours, so that dark themes need nothing; a wide one scrolls.

        Its class is that of pandas' tables: themes of documentation put any other output onto white.
        """
        title, about = escape_html(self.title), escape_html(self.title or ", ".join(self.head))
        head = "".join(f'<th scope="col"{_LEFT}>{escape_html(name)}</th>' for name in self.head)
        rows = "".join(
            f'<tr><th scope="row"{_style(first)}>{_cell(first)}</th>'
            + "".join(f"<td{_style(cell)}>{_cell(cell)}</td>" for cell in rest)
            + "</tr>"
            for first, *rest in self.rows
        )
        foot = "".join(f"<p>{escape_html(line)}</p>" for line in self.foot.splitlines())
        body = (
            f'<div role="group" aria-label="{about}" tabindex="0" style="overflow-x:auto">'
            f'<table class="dataframe"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )
        return f"{title and f'<p><b>{title}</b></p>'}{body if self.rows else ''}{foot}"


def _lines(row: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of text of a row; cells may have several."""
    yield from zip_longest(*(visible(cell).split("\n") for cell in row), fillvalue="")


def _cell(text: str) -> str:
    return escape_html(text).replace("\n", "<br>")


def _style(text: str) -> str:
    """Return the style of a cell: a number keeps its unit beside it, and a sentence is no column of words."""
    longest = max(map(len, text.split("\n")))
    if longest > _LONGEST_NUMBER:
        return _SENTENCE if longest > _SHORTEST_SENTENCE else _LEFT
    return _NUMBER if text[:1].isdecimal() else _LEFT
