"""What ranks hold: in words and as a table, and as a picture.

The picture is one SVG element, without scripts, style sheets and ids.  One row a rank, before on the left and
after on the right.  A number that exactly one rank had before keeps that rank's colour, wherever it is after
the cell; a new one is outlined grey.  So one sees how an operation moves data, and that a reduction makes new
numbers.  Text and lines take the colour of the text around them, so dark themes need nothing; text on a
rank's colour is black or white (`text_on`).  The picture is no wider than a narrow page can show: numbers are
wrapped, not shrunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from nbparallel.errors import rank_list
from nbparallel.errors.text.escaping import escape_html
from nbparallel.errors.text.table import Table
from nbparallel.session.results import DrawnValues
from nbparallel.transfer.variable_info import MOST_NUMBERS
from nbparallel.wire.inspection import Number, ShownBlock, ShownValue
from nbparallel_widgets.sheet import GREY, colour_of, dashes, text_on

SEVERAL, NEW = -1, -2
"""Origins of a number that are no rank."""
NOT_DEFINED = "not defined"
_LONGEST = 9
"""Digits of a whole number that is written out."""


def number_text(number: Number) -> str:
    """Return a number as short as a picture needs it.

    >>> [number_text(n) for n in (12.5, 1e6, True, 7, 123456789012, 1 / 3, float("nan"), 1 + 2j)]
    ['12.5', '1e+06', 'True', '7', '1.235e+11', '0.3333', 'nan', '1+2j']
    """
    if isinstance(number, bool | str):
        return str(number)
    if isinstance(number, complex):
        return f"{number:.3g}"
    if isinstance(number, int) and abs(number) < 10**_LONGEST:
        return str(number)
    return f"{number:.4g}"


class NumberOrigins:
    """Which rank had a number before the cell; where only the values of now are drawn: which has it.

    Parameters
    ----------
    index : int
        The place of the name among `DrawnValues.names`.

    Attributes
    ----------
    complete : bool
        Whether all numbers are known: of long arrays only the first are.
    """

    def __init__(self, drawn: DrawnValues, index: int) -> None:
        self._ranks: dict[tuple[bool, Number], int] = {}
        self._is_now = is_now(drawn)
        self.complete = True
        looks: dict[tuple[int, int, int], ShownValue] = {}
        for rank, report in sorted(drawn.ranks.items(), key=lambda item: item[1].before_ns):
            # a cell moves numbers from one name to another; now each name is by itself
            sources = report.after[index : index + 1] if self._is_now else report.before
            for value in report.after[:1] if made_here(drawn) else sources:
                if value is None:
                    continue
                if value.segment:  # to later looks at this memory, other ranks may have written already
                    value = looks.setdefault((value.segment, value.start, value.stop), value)
                self.complete = self.complete and value.complete
                for number in value.numbers:
                    key = _key(number)
                    self._ranks[key] = rank if self._ranks.get(key, rank) == rank else SEVERAL

    def of(self, number: Number, *, before: bool = False) -> int:
        """Return the only rank that had a number, `SEVERAL` or `NEW`; in doubt `SEVERAL`."""
        if isinstance(number, float) and math.isnan(number):
            return SEVERAL if before or self._is_now else NEW  # it equals nothing
        known = before or self._is_now or not self.complete
        return self._ranks.get(_key(number), SEVERAL if known else NEW)


def _key(number: Number) -> tuple[bool, Number]:
    return isinstance(number, bool), number


def is_now(drawn: DrawnValues) -> bool:
    """Whether values of now are drawn, not those of a cell before and after it."""
    return not any(report.before for report in drawn.ranks.values())


def made_here(drawn: DrawnValues) -> bool:
    """Whether the cell made all of several names: then numbers come from the first one, as it left it."""
    values = [value for report in drawn.ranks.values() for value in report.before]
    return len(drawn.names) > 1 and not is_now(drawn) and not any(values)


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One row of a picture: what a name holds on a rank, or on all of them if that is the same memory."""

    rank: int
    """-1: all ranks."""
    before: tuple[ShownBlock, ...] | None
    """None: the name was not defined."""
    after: tuple[ShownBlock, ...] | None
    """Likewise."""
    left_out: tuple[int, int] = (0, 0)
    """Elements of a list that are not among these, before and after."""
    died: str = ""
    """How the rank ended, which could not report."""


def drawn_rows(drawn: DrawnValues, index: int) -> list[DrawnRow]:
    """Return the rows of a name, by its place among `DrawnValues.names`."""
    before = {rank: report.before[index] for rank, report in drawn.ranks.items() if report.before}
    after = {rank: report.after[index] for rank, report in drawn.ranks.items()}
    died = [DrawnRow(rank, None, None, died=how) for rank, how in drawn.died.items()]
    # ranks looked at different times: the first one saw what was there before, the last one the end
    by_time = sorted(drawn.ranks, key=lambda rank: drawn.ranks[rank].before_ns)
    first = _one_array(before, by_time[:1])
    last = _one_array(after, sorted(drawn.ranks, key=lambda rank: drawn.ranks[rank].after_ns)[-1:])
    if last and (first or not any(before.values())):
        return [DrawnRow(-1, first or None, last), *died]
    found = [
        DrawnRow(
            rank,
            None if old is None else old.blocks,
            None if new is None else new.blocks,
            (old.left_out if old else 0, new.left_out if new else 0),
        )
        for rank, new in after.items()
        for old in [before.get(rank)]
    ]
    return sorted([*found, *died], key=attrgetter("rank"))


def _one_array(values: Mapping[int, ShownValue | None], chosen: Sequence[int]) -> tuple[ShownBlock, ...]:
    """Return the parts of the array that is the same memory on all ranks, as one saw it; else nothing."""
    places = {(value.segment, value.start, value.stop) if value else (0, 0, 0) for value in values.values()}
    if len(values) < 2 or len(places) != 1:
        return ()
    value = values[chosen[0]]
    return value.parts if value is not None else ()


def title_of(drawn: DrawnValues) -> str:
    """Return what is drawn: ``x, y on ranks 0-3 before and after In[3]``."""
    where = rank_list(sorted({*drawn.ranks, *drawn.died})) if drawn.ranks or drawn.died else "no rank"
    cell = f"In[{drawn.number}]" if drawn.number else "the cell"
    when = "now" if is_now(drawn) else f"before and after {cell}"
    return f"{', '.join(drawn.names)} on {where} {when}"


def table_of(drawn: DrawnValues) -> Table:
    """Return everything as a table."""
    now, found = is_now(drawn), []
    for index, name in enumerate(drawn.names):
        origins = NumberOrigins(drawn, index)
        for row in drawn_rows(drawn, index):
            who = "all (shared)" if row.rank < 0 else f"rank {row.rank}"
            if row.died:
                found.append((name, who, "", row.died, ""))
                continue
            before = "" if now else value_text(row.before, row.left_out[0])
            after = value_text(row.after, row.left_out[1])
            found.append((name, who, before, after, sources(row, origins, now)))
    head = ("name", "where", "before", "now" if now else "after", "only on" if now else "numbers from")
    return Table(title_of(drawn), head, found, foot(drawn), widest=1000).without_empty_columns()


def foot(drawn: DrawnValues) -> str:
    """Return what has to be said about where numbers come from."""
    complete = all(NumberOrigins(drawn, index).complete for index in range(len(drawn.names)))
    cut = f"of a long array the first {MOST_NUMBERS:,} numbers were compared"
    first = f"made in this cell: a number is in the colour of the rank that has it in {drawn.names[0]}"
    return "\n".join([cut] * (not complete) + [first] * made_here(drawn))


def sources(row: DrawnRow, origins: NumberOrigins, now: bool) -> str:
    """Return where the numbers of a row come from: ``ranks 0-3``, ``new`` …; where none are, nothing."""
    if not now and row.before == row.after:
        return "unchanged" if row.after else ""
    found = {origins.of(number, before=now) for block in row.after or () for r in block.rows for number in r}
    ranks = sorted(found - {SEVERAL, NEW})
    words = [rank_list(ranks)] if ranks else []
    words += ["several ranks"] * (SEVERAL in found) + ["new"] * (NEW in found)
    return ", ".join(words)


def value_text(blocks: Sequence[ShownBlock] | None, left_out: int = 0) -> str:
    """Return a value in letters; rows of an array are lines."""
    if blocks is None:
        return NOT_DEFINED
    texts = [_block_text(block) for block in blocks]
    texts += [f"… {left_out:,} more"] if left_out else []
    return ("\n" if any("\n" in text for text in texts) else " | ").join(texts)


def _block_text(block: ShownBlock) -> str:
    if text := word_of(block):
        return text
    lines = [" ".join(map(number_text, row)) for row in block.rows]
    if more := left_out_of(block, block.rows):
        lines[-1] += f" … {more:,} more"
    return ("" if block.rank < 0 else f"rank {block.rank}: ") + "\n".join(lines)


def word_of(block: ShownBlock) -> str:
    """Return what stands for a block without numbers; empty if it has some."""
    return block.word or (f"empty ({block.form})" if not block.count else "")


def left_out_of(block: ShownBlock, shown: Sequence[Sequence[Number]]) -> int:
    """Return how many numbers of a block are not shown."""
    return block.count - sum(map(len, shown))


# The picture.

SIZE, SMALL = 13, 12
"""Of letters, in pixels."""
CELL, GAP, LEFT, ARROW = 22, 8, 66, 34
"""Height of a number; space between rows; where values begin; space between before and after."""
SIDE = 208
"""The widest that a value becomes before it is wrapped: eight numbers of two digits."""
LEAST_WIDTH = 330
LINES = 4
"""Lines into which an array of one axis is wrapped, at most."""

Markup = Callable[[float, float], Iterator[str]]


def text_width(text: str, size: float = SIZE, *, bold: bool = False) -> float:
    """Return about how wide text in a sans-serif font is: rather too wide, as fonts differ."""
    narrow = sum(letter in " .,;:'|()[]fijlrtI" for letter in text)
    return (0.6 + 0.05 * bold) * size * (len(text) - narrow) + 0.38 * size * narrow


@dataclass(frozen=True, slots=True)
class Drawing:
    """Something to draw, of known size."""

    width: float
    """In pixels."""
    height: float
    """Likewise."""
    markup: Markup
    """``markup(x, y)`` yields its elements, with the upper left corner there."""
    own_line: bool = False
    """Whether a line ends before it."""


def svg(drawn: DrawnValues) -> str:
    """Return the picture."""
    now = is_now(drawn)
    groups = [(name, drawn_rows(drawn, index)) for index, name in enumerate(drawn.names)]
    origins = [NumberOrigins(drawn, index) for index in range(len(groups))]
    drawings = [
        [_row(row, _cell_width(rows), origin, now) for row in rows]
        for (_, rows), origin in zip(groups, origins, strict=True)
    ]
    first = 0.0 if now else max((before.width for rows in drawings for before, _ in rows), default=0)
    second = max((after.width for rows in drawings for _, after in rows), default=0)
    right = LEFT if now else LEFT + max(first, text_width("before", SMALL)) + ARROW
    width = max(right + second, LEAST_WIDTH)
    parts: list[str] = []
    y = 0.0
    if not now:
        parts += [*_words("before", SMALL).markup(LEFT, y), *_words("after", SMALL).markup(right, y)]
        y += 20
    for (name, rows), pieces in zip(groups, drawings, strict=True):
        parts += _name(name, rows, y)
        y += 22
        for row, (before, after) in zip(rows, pieces, strict=True):
            parts += _who(row.rank).markup(0, y)
            if not now and not row.died:
                parts += before.markup(LEFT, y)
                parts += _arrow(right - ARROW, y)
            parts += after.markup(right if not row.died else LEFT, y)
            y += max(before.height, after.height) + GAP
        y += GAP
    legend = _flow(list(_legend(drawn, [rows for _, rows in groups], origins, now)), width, gap=16, space=0)
    parts += legend.markup(0, y)
    height = y + legend.height + 2
    about, title = escape_html(_said(table_of(drawn))), escape_html(title_of(drawn))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}" '
        f'viewBox="-1 -1 {width + 2:.0f} {height + 2:.0f}" width="{width + 2:.0f}" '
        'style="max-width:100%;height:auto" '
        f'fill="currentColor" font-family="sans-serif" font-size="{SIZE}">'
        f"<title>{title}</title><desc>{about}</desc>"
    )
    return "".join([head, *parts, "</svg>"])


def _said(table: Table) -> str:
    """Return a table as a screen reader reads it, a sentence a row."""
    rows = (
        ", ".join(f"{name} {cell}" for name, cell in zip(table.head, row, strict=True) if cell)
        for row in table.rows
    )
    return "".join(f"{row}. " for row in rows).replace("\n", "; ").strip()


def _cell_width(rows: Sequence[DrawnRow]) -> float:
    """Return how wide the numbers of a name are drawn: all alike."""
    blocks = [block for row in rows for block in (*(row.before or ()), *(row.after or ()))]
    texts = {number_text(number) for block in blocks for line in block.rows for number in line}
    return max((text_width(text) for text in texts), default=0) + 10 if texts else CELL


def _row(row: DrawnRow, cell: float, origins: NumberOrigins, now: bool) -> tuple[Drawing, Drawing]:
    cell = max(cell, CELL + 2)
    if row.died:
        return _words(""), _words(row.died, italic=True)
    before = _value(row.before, row.left_out[0], cell, lambda number: origins.of(number, before=True))
    return before, _value(row.after, row.left_out[1], cell, lambda number: origins.of(number, before=now))


def _value(
    blocks: Sequence[ShownBlock] | None, left_out: int, cell: float, origin: Callable[[Number], int]
) -> Drawing:
    if blocks is None:
        return _words(NOT_DEFINED, italic=True)
    pieces = [_block(block, cell, origin) for block in blocks]
    if left_out:
        pieces.append(_words(f"… {left_out:,} more", SMALL))
    flow = _flow(pieces, SIDE + 2, gap=6)
    return flow if blocks[0].rank < 0 else _framed(flow)


def _block(block: ShownBlock, cell: float, origin: Callable[[Number], int]) -> Drawing:
    if word := word_of(block):
        piece = _words(word, italic=True)
        return piece if block.rank < 0 else _marked(piece, block.rank, 0)
    most = max(1, int(SIDE // cell))
    if len(block.rows) == 1:
        row = block.rows[0]
        length = len(row) if len(row) <= most else min(most, 8)
        lines = [row[i : i + length] for i in range(0, len(row), length)][:LINES]
        grids = [_grid([line], cell, origin) for line in lines]
    else:
        lines = [row[:most] for row in block.rows]
        grids = [_grid(lines, cell, origin)]
    more = left_out_of(block, lines)
    pieces = [Drawing(grid.width, grid.height, grid.markup, own_line=True) for grid in grids]
    if more and block.rank < 0:
        pieces.append(_words(f"… {more:,} more", SMALL))
    piece = _flow(pieces, SIDE + 2, gap=6, space=3)
    return piece if block.rank < 0 else _marked(piece, block.rank, more)


def _grid(rows: Sequence[Sequence[Number]], cell: float, origin: Callable[[Number], int]) -> Drawing:
    def markup(x: float, y: float) -> Iterator[str]:
        for i, row in enumerate(rows):
            for j, number in enumerate(row):
                yield from _number(number, origin(number), x + j * cell, y + i * CELL, cell)

    return Drawing(max(map(len, rows)) * cell, len(rows) * CELL, markup)


def _number(number: Number, origin: int, x: float, y: float, width: float) -> Iterator[str]:
    text = escape_html(number_text(number))
    place = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{CELL - 2}" rx="2"'
    colour = ""
    if origin >= 0:
        about = f"{text}: rank {origin}"
        colour = f' fill="{text_on(colour_of(origin))}"'
        yield f"<g><title>{about}</title><rect {place} {_paint(origin)}/>"
    elif origin == NEW:
        yield f'<g><title>{text}: new</title><rect {place} fill="none" stroke="{GREY}" stroke-width="1.5"/>'
    else:
        yield f'<g><title>{text}: on several ranks</title><rect {place} fill-opacity="0.12"/>'
    middle = f'x="{x + width / 2:.1f}" y="{y + CELL - 6.5:.1f}"'
    yield f'<text {middle} text-anchor="middle"{colour}>{text}</text></g>'


def _paint(rank: int) -> str:
    dashed = dashes(rank)
    stroke = f' stroke="currentColor" stroke-width="2" stroke-dasharray="{dashed}"' if dashed else ""
    return f'fill="{colour_of(rank)}"{stroke}'


def _words(text: str, size: int = SIZE, *, italic: bool = False, bold: bool = False) -> Drawing:
    style = ' font-style="italic"' * italic + ' font-weight="bold"' * bold
    style += f' font-size="{size}"' * (size != SIZE)

    def markup(x: float, y: float) -> Iterator[str]:
        if text:
            yield f'<text x="{x:.1f}" y="{y + CELL - 6.5:.1f}"{style}>{escape_html(text)}</text>'

    return Drawing(text_width(text, size, bold=bold) if text else 0, CELL, markup)


def _who(rank: int) -> Drawing:
    """Return the label of a row: the rank in its colour."""
    if rank < 0:
        return _words("shared")
    text = f"rank {rank}"
    width = max(48, text_width(text, SMALL) + 10)

    def markup(x: float, y: float) -> Iterator[str]:
        yield (
            f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width:.1f}" height="{CELL - 2}" rx="2" '
            f'{_paint(rank)}/><text x="{x + 1 + width / 2:.1f}" y="{y + CELL - 7:.1f}" text-anchor="middle" '
            f'font-size="{SMALL}" fill="{text_on(colour_of(rank))}">{text}</text>'
        )

    return Drawing(width + 2, CELL, markup)


def _marked(piece: Drawing, rank: int, more: int) -> Drawing:
    """Return a part of a shared array, with its rank below it."""
    words = _words(f"rank {rank}" + (f" … {more:,} more" if more else ""), SMALL)
    width = max(piece.width, words.width + 2)

    def markup(x: float, y: float) -> Iterator[str]:
        yield from piece.markup(x, y)
        yield (
            f'<rect x="{x + 1:.1f}" y="{y + piece.height + 1:.1f}" width="{width - 2:.1f}" height="4" '
            f"{_paint(rank)}/>"
        )
        yield from words.markup(x + 1, y + piece.height + 4)

    return Drawing(width, piece.height + CELL + 4, markup)


def _framed(piece: Drawing) -> Drawing:
    def markup(x: float, y: float) -> Iterator[str]:
        size = f'width="{piece.width + 10:.1f}" height="{piece.height + 10:.1f}"'
        yield f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="3" fill="none" stroke="currentColor"/>'
        yield from piece.markup(x + 5, y + 5)

    return Drawing(piece.width + 10, piece.height + 10, markup)


def _flow(pieces: Sequence[Drawing], most: float, *, gap: float, space: float = 6) -> Drawing:
    """Return pieces in lines that are not wider than `most`, unless one is."""
    places: list[tuple[Drawing, float, float]] = []
    x = y = line = widest = 0.0
    for piece in pieces:
        if places and (piece.own_line or x + piece.width > most):
            x, y, line = 0.0, y + line + space, 0.0
        places.append((piece, x, y))
        line, widest = max(line, piece.height), max(widest, x + piece.width)
        x += piece.width + gap

    def markup(left: float, top: float) -> Iterator[str]:
        for piece, x, y in places:
            yield from piece.markup(left + x, top + y)

    return Drawing(widest, y + line, markup)


def _arrow(x: float, y: float) -> Iterator[str]:
    middle = y + CELL / 2
    yield (
        f'<path d="M{x + 8:.1f} {middle}h{ARROW - 18}m-5 -4l5 4l-5 4" fill="none" stroke="currentColor" '
        'stroke-width="1.5"/>'
    )


def _name(name: str, rows: Sequence[DrawnRow], y: float) -> Iterator[str]:
    """Yield the line above the rows of a name, with the form of its arrays if that is one."""
    shown = [row.after or row.before or () for row in rows if not row.died]
    forms = {blocks[0].form for blocks in shown if len(blocks) == 1 and blocks[0].rank < 0}
    bold = _words(name, bold=True)
    yield from bold.markup(0, y)
    if len(forms) == 1 and all(len(blocks) == 1 for blocks in shown) and (form := forms.pop()):
        yield from _words(form, SMALL).markup(bold.width + 8, y)


def _legend(
    drawn: DrawnValues, groups: Sequence[Sequence[DrawnRow]], origins: Sequence[NumberOrigins], now: bool
) -> Iterator[Drawing]:
    found = {
        known.of(number, before=now or side is row.before)
        for rows, known in zip(groups, origins, strict=True)
        for row in rows
        for side in (row.before, row.after)
        for block in side or ()
        for line in block.rows
        for number in line
    }
    is_on = "is" if now else "was"
    if any(origin >= 0 for origin in found):
        yield _words(f"in a rank's colour: no other of these ranks {'has' if now else 'had'} it", SMALL)
    if SEVERAL in found:
        yield _sample(SEVERAL, f"{is_on} on several ranks")
    if NEW in found:
        yield _sample(NEW, "new")
    if any(row.rank < 0 for rows in groups for row in rows):
        yield _words("shared: one array; parts as dist.shard divides it", SMALL)
    for text in foot(drawn).splitlines():
        yield _words(text, SMALL)


def _sample(origin: int, text: str) -> Drawing:
    words = _words(text, SMALL)

    def markup(x: float, y: float) -> Iterator[str]:
        look = f'fill="none" stroke="{GREY}" stroke-width="1.5"' if origin == NEW else 'fill-opacity="0.12"'
        yield f'<rect x="{x + 1:.1f}" y="{y + 4:.1f}" width="18" height="14" rx="2" {look}/>'
        yield from words.markup(x + 25, y)

    return Drawing(words.width + 25, CELL, markup)


@dataclass(frozen=True, slots=True)
class DrawnView:
    """What ranks hold, as a notebook shows it: a picture, which a table in letters repeats."""

    drawn: DrawnValues
    """From ``Session.run(…, draw="x")`` (``.drawn`` of the result), or from `Session.draw`."""

    def __repr__(self) -> str:
        return table_of(self.drawn).text()

    def _repr_html_(self) -> str:
        # The table repeats it where a page is cleaned of pictures (GitHub, an untrusted notebook).
        table = table_of(self.drawn).html()
        return f"<div>{svg(self.drawn)}</div><details><summary>as a table</summary>{table}</details>"
