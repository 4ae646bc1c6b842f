"""Line sampler: which line runs, asked by a signal; for CPython 3.11, which has no `sys.monitoring`.

A handler of SIGPROF runs between two instructions: after C code, and not while the process sleeps.  So the
time of a function in C is that of its line, but the time of an operator can be the next line's.  Statements
of the cell, and operations between ranks, are observed: their time is their own.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from nbparallel.distributed.tracing.profiling.line_log import LineTimer, Times, add, clock

PERIOD = 0.005


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
        signal.setitimer(signal.ITIMER_PROF, PERIOD, PERIOD)
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
