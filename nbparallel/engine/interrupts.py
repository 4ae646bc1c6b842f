"""Interrupts of tasks without races: a word in shared memory and a permanent signal handler.

The kernel writes (task number, sequence) into a word of shared memory and then signals.  The handler raises
only if the word names the task that runs here and this sequence was not used yet.  So an interrupt never
hits the next cell, never an idle rank, and is never lost: after setting its current task the rank reads
the word itself.  Code behind the user's may swallow the exception (IPython's own included): the kernel sends
again, with a new sequence, as long as the task runs.

For the same reason an import is not interrupted: a module that was half imported stays broken
(`asyncio`, numpy), and many a module is imported by code that no user sees, such as the first ``await`` of a
rank.  The kernel's next signal comes soon.  An import that takes long is interrupted all the same.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from nbparallel.wire.control import IMPORT_SECONDS, ControlView

IMPORT_SYSTEM = "<frozen importlib._bootstrap"
"""How the file names of its frames begin."""

ALARM_SECONDS = 0.5
"""Between two alarms: the code that one hit may have swallowed the exception."""

# `signal.getsignal` first looks whether it is a member of an enumeration, which takes 15 µs in every cell.
_handler_of: Callable[[int], Any] = getattr(signal, "_signal", signal).getsignal


class Interrupts:
    """Decides whether a SIGINT is for the task that runs."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.words: ControlView | None = None
        """Those of the current epoch."""
        self._tasks: list[int] = []
        """The task that runs; empty: none."""
        self._used = 0
        self._due = 0.0
        """Until when an import may go on that an interrupt has met; 0.0: none has."""
        self.disarm: Callable[[], None] = self._tasks.clear
        """From now on no interrupt raises.  No code of Python runs in it: an interrupt that arrived there
        would leave the task armed, and the next one would end the rank."""

    def install(self) -> None:
        """Take over SIGINT; a cell may replace the handler for itself, the next one has ours again."""
        signal.signal(signal.SIGINT, self._on_signal)

    def arm(self, task: int) -> None:
        """From now on interrupts of `task` raise KeyboardInterrupt; one that came early does so here."""
        self._used, self._due = 0, 0.0
        if _handler_of(signal.SIGINT) != self._on_signal:
            self.install()  # an earlier cell has put its own there
        self._tasks[:] = [task]
        self._on_signal()

    def end(self, task: int) -> None:
        """Report to the kernel that the task's code has ended, once disarmed: the report follows."""
        if self.words is not None:
            self.words.write_ended(self._rank, task)

    @property
    def raised(self) -> bool:
        """Whether the kernel has interrupted the task that runs, or ran last."""
        return self._used > 0

    def call_within(self, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)``, which an alarm interrupts when it takes longer.

        Raises
        ------
        TimeoutError
            It did; with the frames where it was.
        """
        late = False

        def on_alarm(_number: int, frame: FrameType | None) -> None:
            nonlocal late
            if not self._waits_for_import(frame):
                late = True
                raise KeyboardInterrupt

        former = signal.signal(signal.SIGALRM, on_alarm)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_SECONDS)
                return function(*args)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that was on its way raises here
        except KeyboardInterrupt as stop:
            if not late:
                raise
            raise TimeoutError(f"the item took longer than its time-out of {seconds:g} s").with_traceback(
                stop.__traceback__
            ) from None
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_DFL if former is None else former)

    def _on_signal(self, _number: int = 0, frame: FrameType | None = None) -> None:
        words = self.words
        if words is None or not self._tasks:
            return
        named, sequence = words.read_interrupt(self._rank)
        if named in self._tasks and sequence > self._used and not self._waits_for_import(frame):
            self._used = sequence
            raise KeyboardInterrupt

    def _waits_for_import(self, frame: FrameType | None) -> bool:
        """Return whether `frame` is part of an import that may go on."""
        while frame is not None and not frame.f_code.co_filename.startswith(IMPORT_SYSTEM):
            frame = frame.f_back
        if frame is None:
            return False
        now = time.monotonic()
        self._due = self._due or now + IMPORT_SECONDS
        if now < self._due and self.words is not None and self._tasks:
            self.words.write_importing(self._rank, self._tasks[0])
        return now < self._due
