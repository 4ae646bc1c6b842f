"""Interrupts in the notebook's process: SIGINT is counted instead of raised while ranks run a task.

An exception at an arbitrary place would leave something half done.  What an interrupt does to the ranks is
decided by `tasks.escalation`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self


class InterruptCounter:
    """Counts SIGINT in the main thread inside of its ``with`` block; elsewhere it does nothing.

    An interrupt that was counted and not answered raises `KeyboardInterrupt` at the exit: none is lost.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called in the signal handler, so that a waiting thread reads `count`."""
        self._previous: Any = None
        self._installed = False
        self.count = 0
        """How often SIGINT came."""
        self.answered = 0
        """How many of them were acted on."""
        self._raises = False
        self._uncounted = 0
        self.handed_over = False
        """Whether another thread acts on `count` from now on: then the exit does not raise."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._uncounted:
            self._uncounted -= 1
        else:
            self.add()
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let one SIGINT raise `KeyboardInterrupt` immediately: while the user types nothing is half done."""
        self._raises = True
        try:
            if self.count > self.answered:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def end_raising(self) -> None:
        """Raise `KeyboardInterrupt` in a `raising` block without counting an interrupt; from any thread."""
        main = threading.main_thread().ident
        if self._raises and main is not None:
            self._uncounted += 1
            signal.pthread_kill(main, signal.SIGINT)  # a real one: it also ends a wait for a terminal

    def add(self) -> None:
        """Count one interrupt; from any thread."""
        self.count += 1
        self.wake()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if an interrupt was not acted on."""
        if self.count > self.answered:
            self.answered = self.count
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._previous is None else self._previous)
        if kind is None and not self.handed_over:
            self.check()
