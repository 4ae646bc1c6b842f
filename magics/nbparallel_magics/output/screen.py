"""What a terminal would show of a stream that moves the cursor, as progress bars do.

A front end follows a carriage return on one line at most, and ``tqdm(position=…)`` moves up and down as well.
So what a rank draws is followed here, and shown as lines that are whole.
"""

from __future__ import annotations

import re
from collections import deque

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
