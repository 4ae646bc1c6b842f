"""Interrupts in the kernel: counting presses, and the ladder.

While ranks run a task the kernel's own SIGINT handler only counts and wakes the waiting thread: nothing is
torn down half-way by an exception at an arbitrary place.  The first press interrupts every running rank;
the second names those that do not answer; the third, or five seconds, ends only those.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # `InterruptCounter` is wanted before the rest is imported
    from nbparallel.session.processes.rank_handle import RankHandle
    from nbparallel.wire.control import ControlView

REPEAT_SECONDS = 0.5
"""An interrupt that raised but was swallowed by the code it hit is sent again after this."""
KILL_SECONDS = 5.0
"""Ranks that have not stopped so long after the first press are ended."""


class InterruptCounter:
    """Counts SIGINT in the main thread while it is entered; elsewhere it does nothing.

    A press that nobody answered raises `KeyboardInterrupt` when it is left: none is lost.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called in the signal handler, so that who waits looks at `count`."""
        self._previous: Any = None
        self._installed = False
        self.count = 0
        """How often SIGINT came."""
        self.answered = 0
        """How many of them were acted on."""
        self._raises = False
        self._excused = 0
        self.handed_over = False
        """Whether somebody else looks at `count` from now on: then it does not raise when it is left."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._excused:
            self._excused -= 1
        else:
            self.press()
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let SIGINT raise `KeyboardInterrupt` at once, once: the user is asked, nothing can be torn down."""
        self._raises = True
        try:
            if self.count > self.answered:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def excuse(self) -> None:
        """End what `raising` lets be ended, without counting it as a press; from any thread."""
        main = threading.main_thread().ident
        if self._raises and main is not None:
            self._excused += 1
            signal.pthread_kill(main, signal.SIGINT)  # a real one: it also ends a wait for a terminal

    def press(self) -> None:
        """Count one press; from any thread."""
        self.count += 1
        self.wake()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if there was a press that nobody has acted on."""
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


class InterruptEscalation:
    """Interrupts ranks until they stop; one object for one task."""

    def __init__(self, control: ControlView, task: int) -> None:
        self._control = control
        self._task = task
        self._sequence: dict[int, int] = {}
        self._sent: dict[int, float] = {}
        self.since: float | None = None
        """When the first interrupt was sent (`time.monotonic`)."""

    def interrupt(self, handle: RankHandle) -> None:
        """Interrupt one rank: the word first, then the signal."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
        sequence = self._sequence.get(handle.rank, 0) + 1
        self._sequence[handle.rank] = sequence
        self._sent[handle.rank] = now
        self._control.write_interrupt(handle.rank, self._task, sequence)
        handle.signal(signal.SIGINT)

    def repeat(self, handles: Iterable[RankHandle]) -> None:
        """Interrupt again who was interrupted a while ago and still runs."""
        now = time.monotonic()
        for handle in handles:
            sent = self._sent.get(handle.rank)
            if sent is not None and now - sent >= REPEAT_SECONDS:
                self.interrupt(handle)
