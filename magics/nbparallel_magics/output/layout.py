"""Layout of the output of several ranks: blocks, their order, their labels.

Pure functions from the output of ranks to labelled pieces.  A piece is shown under one label.
Equal text of several ranks becomes one piece; what all of them printed first is one piece even if they
went on differently.  Values of last expressions come after everything else.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nbparallel.errors import grouped, rank_list

# What a terminal would show of a stream that moves the cursor, as progress bars do.
#
# A front end follows a carriage return on one line at most, and ``tqdm(position=…)`` moves up and down as
# well. So what a rank draws is followed here, and shown as lines that are whole.

PATIENCE = 12
"""Calls of `Screen.settle`, which take a second: a rank that is stopped half-way may go on later."""
_MOVES = re.compile(r"\r(?!\n)|\x08|\x1b(?!\[[0-9;]*m)")
_TOKEN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[^\[\x1b\n\r\b]|[\n\r\b]|[^\n\r\b\x1b]+")
_ROWS = re.compile(r"\x1b\[(\d*)([AB])|\n")
_UNFINISHED = re.compile(r"\x1b(\[[0-?]*[ -/]*)?\Z")


def moves_cursor(text: str) -> bool:
    """Whether text does more than write characters and end lines; colours do not."""
    return _MOVES.search(text) is not None


def before_moves(text: str) -> int:
    """Return how much of a text is lines that end before its cursor moves."""
    found = _MOVES.search(text)
    return len(text) if found is None else text.rfind("\n", 0, found.start()) + 1


def rows_above(text: str) -> int:
    """Return by how many lines a text moves the cursor above that in which it begins."""
    row = highest = 0
    for count, kind in _ROWS.findall(text):
        row += max(1, int(count or 1)) * (-1 if kind == "A" else 1)
        highest = min(highest, row)
    return -highest


class ScreenLine:
    """One line of a screen as it is now."""

    __slots__ = ("cells", "drawn", "redrawn")

    def __init__(self) -> None:
        self.cells: list[str] = []
        """Its characters, each with the colour codes that came before it."""
        self.drawn = 0
        """When something was written to it, by the screen's own clock."""
        self.redrawn = False
        """Whether something was written over, or the cursor had come back to it."""

    @property
    def text(self) -> str:
        """What stands on it, without the blanks that have wiped out a longer text."""
        text = "".join(self.cells)
        return text.rstrip(" ") if self.redrawn else text


class Screen:
    """The lines of one stream that may still change; not thread-safe."""

    def __init__(self) -> None:
        self._lines = [ScreenLine()]
        self._entered = [0]  # when the cursor last came to a line from the one above
        self._row = self._column = 0
        self._highest = 0  # the least row since the last `settle`
        self._former: deque[int] = deque([0], PATIENCE)  # and before it
        self._clock = 0
        self._unfinished = self._style = ""
        self._has_moved_up = self._is_back = False

    def feed(self, text: str) -> list[ScreenLine]:
        """Draw more; return the lines over which something was written for the first time."""
        text = self._unfinished + text
        cut = _UNFINISHED.search(text)
        self._unfinished = text[cut.start() :] if cut else ""
        before = {id(line) for line in self._lines if line.redrawn}
        for token in _TOKEN.findall(text[: cut.start()] if cut else text):
            self._clock += 1
            if token == "\n":
                self._move_to(self._row + 1)
                self._column = 0
            elif token == "\r":
                self._column = 0
            elif token == "\b":
                self._column = max(0, self._column - 1)
            elif token[0] == "\x1b":
                self._obey(token)
            else:
                self._write(token)
        return [line for line in self._lines if line.redrawn and id(line) not in before]

    def settle(self) -> list[ScreenLine]:
        """Remove and return the lines above the cursor to which it has not gone back for a while.

        ``tqdm(position=2)`` goes down two lines for every state of its bar, and up again.
        """
        self._former.append(self._highest)
        self._highest = self._row
        return self._remove(min(self._former) if self._has_moved_up else self._former[-1])

    def end(self) -> tuple[list[ScreenLine], str]:
        """Remove and return all lines, and the text of the last one if it was only begun."""
        done = self._remove(self._row)
        first = self._lines[0]
        begun = "" if first.redrawn else first.text
        rest = self._lines[1:] if begun or not first.cells else self._lines
        return [*done, *self._without_blank(rest)], begun

    @property
    def live(self) -> list[ScreenLine]:
        """The lines that hold something and may change, and those above them that were drawn again.

        What a bar that has ended left below the cursor is not among them.
        """
        base = min(self._former[-1], self._highest, self._row)  # the cursor may be down just now
        above = [line for line in self._lines[:base] if line.redrawn]
        below = [line for line in self._lines[base:] if line.drawn >= self._entered[base]]
        return [line for line in above + below if line.text.strip()]

    @property
    def is_idle(self) -> bool:
        """Whether it is as good as a new one."""
        return len(self._lines) == 1 and not self._lines[0].cells and not self._unfinished + self._style

    @property
    def is_settled(self) -> bool:
        """Whether `settle` would remove nothing, now and later."""
        return self._row == 0

    def _remove(self, count: int) -> list[ScreenLine]:
        if count == 0:
            return []
        done, self._lines = self._lines[:count], self._lines[count:]
        entered, self._entered = self._entered[count], self._entered[count:]
        self._row -= count
        self._highest -= count
        self._former = deque((max(0, row - count) for row in self._former), PATIENCE)
        for line in self._lines:  # below the cursor: what a bar that has ended since left there
            if line.drawn < entered:
                line.cells.clear()
        while len(self._lines) > self._row + 1 and not self._lines[-1].cells:
            del self._lines[-1], self._entered[-1]
        return self._without_blank(done)

    def _without_blank(self, lines: list[ScreenLine]) -> list[ScreenLine]:
        """Leave out empty lines that the cursor only passed, and those that were wiped out."""
        return [line for line in lines if line.text.strip() or not (line.redrawn or self._has_moved_up)]

    def _move_to(self, row: int) -> None:
        self._is_back = row < self._row
        self._has_moved_up = self._has_moved_up or self._is_back
        while len(self._lines) <= row:
            self._lines.append(ScreenLine())
            self._entered.append(self._clock)
        if row > self._row:
            self._entered[self._row + 1 : row + 1] = [self._clock] * (row - self._row)
        self._row = max(0, row)
        self._highest = min(self._highest, self._row)

    def _obey(self, code: str) -> None:
        """Do what an escape sequence asks for (ECMA-48); those that are not known change nothing."""
        line, kind, digits = self._lines[self._row], code[-1], code[2:-1].split(";")[0]
        count = int(digits) if digits.isdecimal() else 0
        if kind == "m":
            if 0 < self._column <= len(line.cells):
                line.cells[self._column - 1] += code
            else:
                self._style += code
        elif kind in "AB":
            self._move_to(self._row + max(1, count) * (1 if kind == "B" else -1))
        elif kind in "CDG":
            start = 0 if kind == "G" else self._column
            step = max(1, count)
            self._column = max(0, start + {"C": step, "D": -step, "G": step - 1}[kind])
        elif kind == "K":
            line.redrawn = line.redrawn or bool(line.cells)
            if count == 1:
                line.cells[: self._column] = [" "] * min(self._column, len(line.cells))
            else:
                del line.cells[0 if count == 2 else self._column :]

    def _write(self, text: str) -> None:
        line, column = self._lines[self._row], self._column
        line.cells += [" "] * (column - len(line.cells))
        line.redrawn = line.redrawn or self._is_back or column < len(line.cells)
        cells = list(text)
        cells[0], self._style = self._style + cells[0], ""
        line.cells[column : column + len(cells)] = cells
        line.drawn = self._clock
        self._column = column + len(cells)


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one stream."""

    name: str
    """``stdout`` or ``stderr``."""
    text: str


@dataclass(frozen=True, slots=True)
class Rich:
    """A rich display, or the value of a last expression."""

    data: dict[str, Any]
    """The mime bundle."""
    metadata: dict[str, Any]
    transient: dict[str, Any]
    """Holds ``display_id``, if the display can be updated."""
    is_value: bool = False
    """Whether it is shown as ``Out[rank 0]:``."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A line that is drawn again and again, as progress bars do; it goes on changing."""

    name: str
    """``stdout`` or ``stderr``."""
    line: ScreenLine

    def as_text(self) -> Text | None:
        """Return what it holds now, None if that is nothing."""
        text = self.line.text
        return Text(self.name, f"{text}\n") if text.strip() else None


Item = Text | Rich
Arrival = tuple[int, Text | Rich | Progress]
"""What a rank showed: (rank, item)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Output under one label."""

    ranks: tuple[int, ...]
    """Ascending; empty for a note of our own."""
    item: Item
    tidy: bool = True
    """False if a line behind its label went on over several lines: it came that way."""

    @property
    def label(self) -> str:
        """Return ``[ranks 0-3]``, or ``Out[rank 2]:`` for a value."""
        ranks = rank_list(self.ranks)
        return f"Out[{ranks}]:" if isinstance(self.item, Rich) and self.item.is_value else f"[{ranks}]"


def as_items(arrivals: Iterable[Arrival]) -> list[tuple[int, Item]]:
    """Return what arrived, lines that may change as they are now."""
    now = ((rank, item.as_text() if isinstance(item, Progress) else item) for rank, item in arrivals)
    return [(rank, item) for rank, item in now if item is not None]


def merged(items: Iterable[Item]) -> list[Item]:
    """Join neighbouring text of one stream: output comes in pieces of any size."""
    runs: list[tuple[str, list[str]] | Rich] = []
    for item in items:
        if isinstance(item, Rich):
            runs.append(item)
        elif runs and isinstance(runs[-1], tuple) and runs[-1][0] == item.name:
            runs[-1][1].append(item.text)
        else:
            runs.append((item.name, [item.text]))
    return [run if isinstance(run, Rich) else Text(run[0], "".join(run[1])) for run in runs]


def arrange(arrivals: Iterable[Arrival]) -> list[Piece]:
    """Return the pieces in rank order, equal ones folded, values last."""
    outputs = {rank: merged(items) for rank, items in grouped(as_items(arrivals)).items()}
    bodies = {rank: [i for i in outputs[rank] if not is_value(i)] for rank in sorted(outputs)}
    values = {rank: [i for i in outputs[rank] if is_value(i)] for rank in sorted(outputs)}
    bodies = {rank: body for rank, body in bodies.items() if body}
    pieces = []
    common = _common_start(list(bodies.values()))
    if common is not None:
        pieces.append(Piece(tuple(bodies), common))
        bodies = {rank: _without_start(body, len(common.text)) for rank, body in bodies.items()}
    return [*pieces, *_fold(bodies), *_fold(values)]


def in_arrival_order(arrivals: Iterable[Arrival]) -> list[Piece]:
    """Return the pieces as they came: one for each run of one rank's text."""
    runs = groupby(as_items(arrivals), key=lambda arrival: arrival[0])
    return [Piece((rank,), item) for rank, run in runs for item in merged(item for _, item in run)]


def beginning(item: Item, characters: int) -> Item:
    """Return what is shown of an item that is too long: the start of its text."""
    if isinstance(item, Text):
        return Text(item.name, item.text[:characters] + "\n")
    text = str(item.data.get("text/plain", ""))
    data = {"text/plain": text if len(text) <= characters else f"{text[:characters]} …"}
    return Rich(data, {}, item.transient, is_value=item.is_value)


def is_value(item: object) -> bool:
    """Whether an item is the value of a last expression."""
    return isinstance(item, Rich) and item.is_value


def _common_start(bodies: Sequence[Sequence[Item]]) -> Text | None:
    """Return the whole lines that every rank printed first, if there are two ranks and they differ later."""
    first = [body[0] for body in bodies]
    texts = [item.text for item in first if isinstance(item, Text)]
    if len(texts) < 2 or len(texts) < len(bodies) or all(_key(body) == _key(bodies[0]) for body in bodies):
        return None
    name = first[0].name if isinstance(first[0], Text) else ""
    if any(isinstance(item, Text) and item.name != name for item in first):
        return None
    shortest, longest = min(texts), max(texts)  # the ends of the alphabet share what all share
    length = next(
        (i for i, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b), len(shortest)
    )
    end = shortest.rfind("\n", 0, length) + 1
    return Text(name, shortest[:end]) if end else None


def _without_start(body: Sequence[Item], length: int) -> list[Item]:
    first = body[0]
    rest = list(body[1:])
    if isinstance(first, Text) and len(first.text) > length:
        rest.insert(0, Text(first.name, first.text[length:]))
    return rest


def _fold(bodies: Mapping[int, Sequence[Item]]) -> list[Piece]:
    groups = grouped((_key(body) or f"rank {rank}", rank) for rank, body in bodies.items() if body)
    return [Piece(tuple(ranks), item) for ranks in groups.values() for item in bodies[ranks[0]]]


def _key(body: Iterable[Item]) -> str:
    """Say what a person would see: stdout and stderr each as a whole, for their order may differ by chance.

    Empty if there is a display that can be updated later: it stays this rank's own.
    """
    parts: list[Any] = []
    out = err = ""
    for item in body:
        if isinstance(item, Text):
            out, err = (out + item.text, err) if item.name == "stdout" else (out, err + item.text)
        elif item.transient.get("display_id") is not None:
            return ""
        else:
            parts += [out, err, sorted(item.data.items()), sorted(item.metadata.items())]
            out = err = ""
    return repr([*parts, out, err])


def fits_behind_label(text: str) -> bool:
    """Whether text may stand on the label's own line: one line, and nothing that moves the cursor back."""
    return "\n" not in text[:-1] and not moves_cursor(text)


# The lines that ranks draw again and again, as progress bars do: kept as they are now, shown in place.

INTERVAL = 0.2
"""Seconds between two states that are shown."""
CHEAP_LINES = 16
"""With more lines the states come less often, so that as much is shown in a second."""
NO_RANK = -1
"""In the place of a rank: a line of our own."""
LINES_OF_A_RANK = 3
"""Shown while the cell runs: bars inside each other, and some that have ended."""


class LiveLines:
    """The screens of those streams of ranks that move the cursor; not thread-safe, its owner holds a lock.

    Parameters
    ----------
    in_place : bool
        Whether a line can be shown while it changes; if not it is text as soon as it has ended.
    """

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._screens: dict[tuple[int, str], Screen] = {}
        self._ended: dict[int, deque[ScreenLine]] = {}
        self._changed = False
        self._next = 0.0

    def has(self, rank: int, name: str) -> bool:
        """Whether the next text of a stream has to be drawn."""
        return (rank, name) in self._screens

    def feed(self, rank: int, name: str, text: str) -> list[Arrival]:
        """Draw text; return the lines that it has made the first to be drawn again."""
        screen = self._screens.setdefault((rank, name), Screen())
        lines = screen.feed(text)
        self._changed = True
        return [(rank, Progress(name, line)) for line in lines] if self._in_place else []

    def settle(self) -> list[tuple[int, Text]]:
        """Return the lines that are ordinary text, and cannot change any more."""
        found = []
        for (rank, name), screen in list(self._screens.items()):
            lines = screen.settle()
            found += self._take(rank, name, lines)
            self._changed = self._changed or bool(lines)
            if screen.is_idle:
                del self._screens[rank, name]
        return found

    def end(self) -> list[tuple[int, Text]]:
        """End all lines; return those that are ordinary text."""
        found = []
        for (rank, name), screen in self._screens.items():
            lines, begun = screen.end()
            found += self._take(rank, name, lines)
            if begun:
                found.append((rank, Text(name, begun)))
        self._screens, self._ended, self._changed = {}, {}, False
        return found

    def drop(self, rank: int) -> None:
        """Forget what a rank has drawn."""
        self._screens = {key: screen for key, screen in self._screens.items() if key[0] != rank}
        self._changed = self._ended.pop(rank, None) is not None or self._changed

    @property
    def are_due(self) -> bool:
        """Whether something is to be shown, or could be settled soon."""
        return self._changed or any(not screen.is_settled for screen in self._screens.values())

    def next_state(self, *, again: bool) -> str | None:
        """Return the lines as they are now; None if they are not due.  `again`: what was shown is gone."""
        now = time.monotonic()
        if not (again or (self._changed and now >= self._next)):
            return None
        lines: dict[int, list[ScreenLine]] = {rank: list(ended) for rank, ended in self._ended.items()}
        for (rank, _), screen in self._screens.items():
            lines.setdefault(rank, []).extend(screen.live)
        shown = [(rank, line.text) for rank in sorted(lines) for line in lines[rank][-LINES_OF_A_RANK:]]
        self._changed = False
        self._next = now + INTERVAL * max(1.0, len(shown) / CHEAP_LINES)
        return _labelled(shown)

    def _take(self, rank: int, name: str, lines: Iterable[ScreenLine]) -> list[tuple[int, Text]]:
        texts = []
        for line in lines:
            if line.redrawn and self._in_place:
                self._ended.setdefault(rank, deque(maxlen=LINES_OF_A_RANK)).append(line)
            else:
                texts.append((rank, Text(name, f"{line.text}\n")))
        return texts


def last_state(arrivals: Iterable[Arrival]) -> str:
    """Return all lines that were drawn again, as they are in the end."""
    lines = as_items((rank, item) for rank, item in arrivals if isinstance(item, Progress))
    texts = [(rank, item.text.rstrip("\n")) for rank, item in lines if isinstance(item, Text)]
    return _labelled(sorted(texts, key=lambda line: line[0]))


def _labelled(lines: Iterable[tuple[int, str]]) -> str:
    labels = ((rank_list((rank,)) if rank != NO_RANK else "nbparallel", text) for rank, text in lines)
    return "\n".join(f"[{label}] {text}" for label, text in labels)
