"""What one rank reports of the lines of a cell, and the base of what measures them."""

from __future__ import annotations

import ast
import linecache
import reprlib
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any, Self

from nbparallel.distributed.runtime.call_site import label_function
from nbparallel.distributed.runtime.observers import ObservedCell

clock = time.perf_counter_ns
LONG_NS = 20_000_000
"""A statement that takes less is nothing to advise about."""
Times = list[int]
"""Nanoseconds in all, and of them those waiting and those moving data."""


@dataclass(frozen=True, slots=True)
class LineLog:
    """The time of each line on one rank."""

    rank: int
    """Its number."""
    lines: tuple[tuple[Any, ...], ...]
    """File, line, nanoseconds in all, and of them waiting and moving; no file: between the lines."""
    texts: dict[str, tuple[str, tuple[str, ...]]]
    """Of each file what it is called (empty: the cell that ran), and its lines."""
    remark: str
    """What could not be seen."""
    results: tuple[tuple[int, int, str, str], ...] = ()
    """Line, nanoseconds, names and what they hold then: statements that called no operation."""


class LineTimer:
    """Base of what measures the lines of a cell on a rank, in the thread that enters it."""

    remark = ""

    def __init__(self, cell: ObservedCell) -> None:
        self._communicator, self._filename = cell.communicator, cell.filename
        self._variables = cell.variables
        self._label_of = label_function(cell.filename)
        self._users: dict[str, bool] = {}
        self._last, self._spent = clock(), self._communicator.spent()

    def __enter__(self) -> Self:
        try:
            self.start()
            self._ends = self.stop
        except RuntimeError as error:
            self.remark, self._ends = str(error), lambda: None
        return self

    def __exit__(self, *_: object) -> None:
        self._ends()

    @abstractmethod
    def start(self) -> None:
        """Begin; RuntimeError if other code has what this needs."""

    @abstractmethod
    def stop(self) -> None:
        """End, and release what it needs."""

    @abstractmethod
    def lines(self) -> Iterator[tuple[str, int, Times]]:
        """Yield file, line and times of each line; what no line of the user's took is line 0 of no file."""

    def value(self, value: Any) -> Any:
        """Return the value of the cell's last expression: it is left alone."""
        return value

    def log(self) -> LineLog:
        """Return the time of each line, with its text."""
        found = [(filename, line, times) for filename, line, times in self.lines() if times[0] > 0]
        texts = {
            filename: (self._label_of(filename) or "", tuple(linecache.getlines(filename)))
            for filename in {filename for filename, *_ in found if filename}
        }
        lines = tuple((filename, line, *times) for filename, line, times in found)
        return LineLog(self._communicator.rank, lines, texts, self.remark, tuple(self._results()))

    def _results(self) -> Iterator[tuple[int, int, str, str]]:
        """Yield what long statements of the cell have left, where ranks did not communicate in them."""
        notes, ended = self._communicator.timeline(), time.monotonic_ns()
        if notes is None or notes.omitted:
            return
        try:
            body = ast.parse("".join(linecache.getlines(self._filename))).body
        except SyntaxError:  # with IPython's syntax
            return
        statements, shown = {node.lineno: node for node in body}, reprlib.Repr()
        shown.maxother = shown.maxstring = 400
        for (line, begin), (_, end) in pairwise((*notes.statements, (0, ended))):
            alone = not any(begin <= operation[2] < end for operation in notes.noted)
            if end - begin >= LONG_NS and alone and line in statements:
                names = sorted(set(_assigned(statements[line])))
                texts = [""]
                with suppress(Exception):  # the value's own code; an int may have too many digits
                    texts = [shown.repr(self._variables.get(name)) for name in names]
                yield line, end - begin, ", ".join(names), "\n".join(texts)

    def _is_users(self, filename: str) -> bool:
        found = self._users.get(filename)
        if found is None:
            found = self._users[filename] = self._label_of(filename) is not None
        return found

    def _running(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame of the user's."""
        while frame is not None and not self._is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def _since(self, now: int) -> Times:
        """Return how long it is since the last event."""
        spent = self._communicator.spent()
        found = [now - self._last, spent[0] - self._spent[0], spent[1] - self._spent[1]]
        self._last, self._spent = now, spent
        return found


def _assigned(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def add(times: Times, more: Times) -> None:
    """Add times to others."""
    times[0] += more[0]
    times[1] += more[1]
    times[2] += more[2]
