"""Line sampler: which line runs, asked by a signal; for CPython 3.11, which has no `sys.monitoring`.

A handler of SIGPROF runs between two instructions: after C code, and not while the process sleeps.  So the
time of a function in C is that of its line, but the time of an operator can be the next line's.  Operations
between ranks are observed, so that their time is their line's.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbparallel.distributed.runtime.observers import ObservedCell

PERIOD = 0.005
_clock = time.perf_counter_ns


class LineSampler:
    """Samples the lines of the main thread.

    Parameters
    ----------
    label_of : callable
        Returns what a file is called, None if it is none of the user's.
    cell : ObservedCell
    """

    remark = (
        "Python 3.11 samples lines of loops and functions: the time of an operator, or of a sleep, may be "
        "shown on the line after it; Python 3.12 measures all lines"
    )

    def __init__(self, label_of: Callable[[str], str | None], cell: ObservedCell) -> None:
        self._label_of, self._communicator, self._filename = label_of, cell.communicator, cell.filename
        self._users: dict[str, bool] = {}
        self._times: dict[tuple[str, int], list[int]] = {}
        self._place = "", 0

    def start(self) -> None:
        """Begin; RuntimeError if the user's code has a handler of the signal or its timer."""
        if signal.getsignal(signal.SIGPROF) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_PROF)[0]:
            raise RuntimeError("SIGPROF has a handler already, and Python 3.11 needs it")
        self._spent, self._last = self._communicator.spent(), _clock()
        self._communicator.observers.add(self, ("at_line", *self._communicator.traced))
        signal.signal(signal.SIGPROF, self._sampled)
        signal.setitimer(signal.ITIMER_PROF, PERIOD, PERIOD)

    def stop(self) -> None:
        """End; a handler or timer that the user's code has set stays."""
        self._turn(None)
        self._communicator.observers.remove(self)
        if signal.getsignal(signal.SIGPROF) == self._sampled:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def lines(self) -> Iterator[tuple[str, int, list[int]]]:
        """Yield file, line and times of each line; what no line of the user's took is line 0 of no file."""
        for (filename, line), times in self._times.items():
            yield filename, line, times

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return an operation whose whole time is its line's; or what the engine calls for a statement."""

        def began(line: int, last_line: int = 0) -> Any:
            self._turn(None)
            self._place = self._filename, line
            return call(line, last_line)

        def observed(*args: Any, **options: Any) -> Any:
            self._turn(None)
            self._place = self._running(sys._getframe(1)) or self._place
            try:
                return call(*args, **options)
            finally:
                self._turn(None)

        return began if name == "at_line" else observed

    def _sampled(self, _number: int, frame: FrameType | None) -> None:
        self._turn(self._running(frame))

    def _running(self, frame: FrameType | None) -> tuple[str, int] | None:
        while frame is not None:
            name = frame.f_code.co_filename
            users = self._users.get(name)
            if users is None:
                users = self._users[name] = self._label_of(name) is not None
            if users:
                return name, frame.f_lineno
            frame = frame.f_back
        return None

    def _turn(self, place: tuple[str, int] | None) -> None:
        """Add the time since the last look to a place, None: the one that was running then."""
        if place is not None:
            self._place = place
        now, spent = _clock(), self._communicator.spent()
        times = self._times.setdefault(self._place, [0, 0, 0])
        for i, more in enumerate((now - self._last, spent[0] - self._spent[0], spent[1] - self._spent[1])):
            times[i] += more
        self._last, self._spent = now, spent
