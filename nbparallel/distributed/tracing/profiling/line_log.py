"""What one rank reports of the lines of a cell, the base of what measures them, and what samples them."""

from __future__ import annotations

import ast
import linecache
import reprlib
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import FrameType
from typing import Any, Self

from nbparallel.distributed.runtime.call_site import label_function
from nbparallel.distributed.runtime.observers import ObservedCell

clock = time.perf_counter_ns
SAMPLE_SECONDS = 0.005
OWN = "<nbparallel>"
"""Of code that is measured as if it were the user's."""
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
        self._is_users = cache(lambda filename: filename == OWN or self._label_of(filename) is not None)
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


def add(times: Times, more: Sequence[int]) -> None:
    """Add times to others."""
    times[0] += more[0]
    times[1] += more[1]
    times[2] += more[2]


# Which line runs, asked by a signal: for CPython 3.11, which has no `sys.monitoring`.
#
# A handler of SIGPROF runs between two instructions: after C code, and not while the process sleeps.  So the
# time of a function in C is that of its line, but the time of an operator can be the next line's.  Statements
# of the cell, and operations between ranks, are observed: their time is their own.


class LineSampler(LineTimer):
    """Samples the lines of the main thread."""

    remark = (
        "Python 3.11 samples lines of loops and functions: the time of an operator, or of a sleep, may be "
        "shown on the line after it; Python 3.12 measures all lines"
    )

    def start(self) -> None:
        """Begin; RuntimeError if the user's code has a handler of the signal."""
        self._times: dict[tuple[str, int], Times] = {}
        self._place = "", 0
        if signal.getsignal(signal.SIGPROF) is not signal.SIG_DFL:
            raise RuntimeError("SIGPROF has a handler already, and Python 3.11 needs it to profile")
        self._communicator.observers.add(self, ("at_line", *self._communicator.traced))
        self._handler = lambda _, frame: self._turn(frame)
        signal.signal(signal.SIGPROF, self._handler)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
        self._period = signal.getitimer(signal.ITIMER_PROF)[1]  # as the system rounds it

    def stop(self) -> None:
        """End; a handler or a timer that the user's code has set stays."""
        if signal.getitimer(signal.ITIMER_PROF)[1] == self._period:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if signal.getsignal(signal.SIGPROF) is self._handler:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
        self._communicator.observers.remove(self)
        self._turn(None)

    def lines(self) -> Iterator[tuple[str, int, Times]]:
        """Yield file, line and times of each line; what no line of the user's took is line 0 of no file."""
        for (filename, line), times in self._times.items():
            yield filename, line, times

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return an operation whose whole time is its line's; or what the engine calls for a statement."""

        def observed(*args: Any, **options: Any) -> Any:
            self._turn(None)
            if name == "at_line":
                self._place = self._filename, args[0]
            else:
                self._turn(sys._getframe(1))
            try:
                return call(*args, **options)
            finally:
                self._turn(None)

        return observed

    def _turn(self, frame: FrameType | None) -> None:
        """Add the time since the last look to the line that runs, None: to the one that ran then."""
        if (frame := self._running(frame)) is not None:
            self._place = frame.f_code.co_filename, frame.f_lineno
        add(self._times.setdefault(self._place, [0, 0, 0]), self._since(clock()))
