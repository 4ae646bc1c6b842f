"""A small table, as text and as HTML that takes its colours from the notebook's theme."""

from __future__ import annotations

import re
import textwrap
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from nbparallel.errors.text.escaping import escape_html, visible

SHOWN = 8
"""Rows above the fold."""
_CARD = ' style="border:1px solid #8885;border-radius:6px;padding:8px 12px;margin:2px 0"'
_TITLE = "display:flex;flex-wrap:wrap;gap:0 12px;align-items:baseline;margin:0"
MUTED = "opacity:.7;font-size:12px"
"""The style of what stands in the second row."""
_PLAIN = "background:none;border:0"
_CELL = "padding:1px 9px 1px 0;vertical-align:top;border:0;max-width:none;"
_LONGEST_NUMBER = 16
"""Characters of a number with its unit, or of a segment's id."""
_SHORTEST_SENTENCE = 28
"""Characters."""
_NUMBER = re.compile(r"[-·]|[-<]?\d[\d,.]*(e[-+]\d+)?( ?(%|s|ms|µs|B|[KMGTPE]iB))?")
BLUE = "#0068A8"
"""Of bars; other pictures begin with it."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LETTERS = 10


def bar(share: float) -> str:
    """Return a bar in letters, which HTML draws; the whole has ten letters.

    >>> bar(1.0), bar(0.33), bar(0)
    ('██████████', '███▎', '▏')
    """
    eighths = max(1, round(8 * _LETTERS * share))
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def muted(text: str) -> str:
    """Return lines as HTML that stands back: notes, and what is below a table."""
    return "".join(f'<div style="{MUTED}">{escape_html(line)}</div>' for line in text.splitlines())


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
    """A title, a head, rows, and what stands below them; columns of numbers are aligned at the right."""

    title: str
    """One line."""
    head: tuple[str, ...]
    """Names of the columns."""
    rows: Sequence[tuple[str, ...]]
    """As many cells as the head has, of one line or several; the first one names its row."""
    foot: str = ""
    """Lines."""
    note: str = ""
    """One line of what matters less than the title."""
    more: str = ""
    """What the rows after the first ones are, which are folded; empty: none is."""
    shown: int = SHOWN
    """Rows above the fold."""
    widest: int = 76
    """Characters of a line in a cell of text: a longer one is wrapped."""
    failed: bool = False
    """Whether the title is about a failure: it is red."""

    def table(self) -> Table:
        """Return it, as it is shown."""
        return self

    def without_empty_columns(self) -> Table:
        """Return the table without its empty columns."""
        used = [i for i in range(len(self.head)) if any(row[i] for row in self.rows)]
        rows = [tuple(row[i] for i in used) for row in self.rows]
        return replace(self, head=tuple(self.head[i] for i in used), rows=rows)

    def unfolded(self) -> Table:
        """Return the table with all its rows in sight."""
        return replace(self, more="")

    def numbers(self) -> set[int]:
        """Return which columns hold numbers alone."""
        return {
            i
            for i in range(len(self.head))
            if any(cells := [row[i] for row in self.rows if row[i]]) and all(map(_NUMBER.fullmatch, cells))
        }

    def text(self) -> str:
        """Return the table in columns of text; of a fold only what is in it."""
        shown, numbers = self.rows[: self.shown] if self.more else self.rows, self.numbers()
        lines = [self.head, *(line for row in shown for line in self._lines(row))] if shown else []
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))] if lines else []
        body = [
            "  ".join(
                cell.rjust(width) if i in numbers else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        more = f"… {self.more}: with --all" * (len(self.rows) > len(shown))
        parts = (self.title, *body, more * bool(body), self.note, self.foot, more * (not body))
        return "\n".join(visible(part).rstrip() for part in parts if part)

    def _lines(self, row: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield the lines of text of a row; cells may have several, and long ones are wrapped."""
        cells = ([part for line in visible(cell).split("\n") for part in self._wrapped(line)] for cell in row)
        yield from zip_longest(*cells, fillvalue="")

    def _wrapped(self, line: str) -> list[str]:
        return textwrap.wrap(line, self.widest, break_long_words=False) if len(line) > self.widest else [line]

    def html(self) -> str:
        """Return a table whose text has the colour of the page; a wide one scrolls.

        Its class is that of pandas' tables: themes of documentation put any other output onto white.
        """
        red = ";color:var(--jp-error-color1,#d32f2f)" * self.failed
        title = f'<b style="font-size:15px{red}">{escape_html(self.title)}</b>' * bool(self.title)
        note = f'<small style="{MUTED};margin-left:auto">{escape_html(self.note)}</small>' * bool(self.note)
        head = f'<p style="{_TITLE}">{title}{note}</p>' * bool(title or note)
        shown = len(self.rows) if not self.more else self.shown
        fold = (
            f'<details><summary style="{MUTED};cursor:pointer">{escape_html(self.more)}</summary>'
            f"{self._rows(self.rows[shown:])}</details>"
        ) * (shown < len(self.rows))
        return f"<div{_CARD}>{head}{self._rows(self.rows[:shown])}{muted(self.foot)}{fold}</div>"

    def _rows(self, rows: Sequence[tuple[str, ...]]) -> str:
        if not rows:
            return ""
        numbers, about = self.numbers(), escape_html(self.title or ", ".join(self.head))
        # so that the columns below a fold are those above it
        longest = [max(len(row[i]) for row in (self.head, *self.rows)) for i in range(len(self.head))]
        widths = [min(width, _LONGEST_NUMBER) * bool(self.more) for width in longest]
        head = "".join(
            f'<th scope="col" style="{_CELL}{_side(i in numbers)};white-space:normal;font-weight:400;'
            f'opacity:.7;min-width:{width}ch">{escape_html(name)}</th>'
            for i, (name, width) in enumerate(zip(self.head, widths, strict=True))
        )
        body = "".join(
            f'<tr style="{_PLAIN}"><th scope="row"{_style(first, 0 in numbers)}>{_cell(first)}</th>'
            + "".join(
                f"<td{_style(cell, i in numbers)}>{_cell(cell)}</td>" for i, cell in enumerate(rest, start=1)
            )
            + "</tr>"
            for first, *rest in rows
        )
        return (
            f'<div role="group" aria-label="{about}" tabindex="0" style="overflow-x:auto">'
            f'<table class="dataframe" style="{_PLAIN};margin:2px 0"><thead><tr style="{_PLAIN}">{head}</tr>'
            f"</thead><tbody>{body}</tbody></table></div>"
        )


def _cell(text: str) -> str:
    if text and not set(text) - set(_EIGHTHS):
        eighths = sum(map(_EIGHTHS.index, text))
        return f'<div style="height:8px;width:{1.25 * eighths:g}px;margin-top:5px;background:{BLUE}"></div>'
    return escape_html(text).replace("\n", "<br>")


def _side(number: bool) -> str:
    return "text-align:right;white-space:nowrap" if number else "text-align:left"


def _style(text: str, number: bool) -> str:
    """Return the style of a cell: a number keeps its unit beside it, and a sentence is no column of words."""
    longest = max(map(len, text.split("\n")))
    wide = ";min-width:14em" * (longest > _SHORTEST_SENTENCE)
    beside = ";white-space:nowrap" * (longest <= _LONGEST_NUMBER and text[:1].isdecimal() and not number)
    return f' style="{_CELL}{_side(number)}{wide}{beside}"'
