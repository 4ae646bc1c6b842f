"""Interrupts in the notebook's process: SIGINT is counted instead of raised while ranks run a task.

An exception at an arbitrary place would leave something half done.  So what the program's own signal handlers
raise (an alarm's time-out, pytest-timeout) is kept, counts as an interrupt, and is raised when the ranks have
stopped.  What an interrupt does to the ranks is decided by `tasks.task_run`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from nbparallel.errors import (
    STOPPED,
    BusyError,
    CellTimeoutError,
    ClosedError,
    ForkedRankError,
    ParallelError,
)

# `signal.getsignal` first looks whether it is a member of an enumeration, which takes 15 µs in every cell.
_handler_of: Callable[[int], Any] = getattr(signal, "_signal", signal).getsignal
_HANDLED = [
    int(getattr(signal, f"SIG{name}"))
    for name in ("ALRM", "VTALRM", "PROF", "USR1", "USR2", "TERM", "HUP", "QUIT", "XCPU", "CHLD")
    if hasattr(signal, f"SIG{name}")
]
"""Signals for which programs have handlers that may raise."""
PATIENCE_SECONDS = 15.0
"""Ranks that do not stop are killed after a third of this (`task_run.KILL_SECONDS`)."""


class InterruptCounter:
    """Counts SIGINT in the main thread inside of its ``with`` block; elsewhere it does nothing.

    An interrupt that was counted and not answered raises `KeyboardInterrupt` at the exit: none is lost.  What
    a handler of another signal raises is counted likewise, and raised instead.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called in the signal handler, so that a waiting thread reads `count`."""
        self._previous: Any = None
        self._deferred: dict[int, tuple[Any, Any]] = {}
        self._raised: BaseException | None = None
        self._kept = 0.0
        self._installed = False
        self.count: int = 0
        """How often SIGINT came."""
        self.answered: int = 0
        """How many of them were acted on."""
        self._raises = False
        self._uncounted = 0
        self.handed_over = False
        """Whether another thread acts on `count` from now on: then the exit does not raise."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
            for number in _HANDLED:
                if callable(handler := _handler_of(number)):
                    self._deferred[number] = handler, self._deferring(handler)
                    signal.signal(number, self._deferred[number][1])
        return self

    def _deferring(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[..., None]:
        """Return a handler that keeps what `handler` raises, as long as this block lasts."""

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                if error.__traceback__ is not None:
                    error.__traceback__ = error.__traceback__.tb_next  # without this function
                if not self._installed or not self.keep(error):
                    raise
                if self._raises:
                    self._raises = False
                    raise KeyboardInterrupt from None

        return handle

    def keep(self, error: BaseException) -> bool:
        """Keep `error`, of the program's own code, to be raised afterwards; the first counts as an interrupt.

        Returns False if the first was kept so long ago that waiting for the ranks is not what takes the time:
        then the caller raises.
        """
        now = time.monotonic()
        if self._raised is None:  # a timer may fire again and again, and asks for no more than the first time
            self._raised, self._kept = error, now
            self.add()
        return now - self._kept < PATIENCE_SECONDS

    def take_raised(self) -> BaseException | None:
        """Return what a signal handler has raised, once; the caller raises it."""
        error, self._raised = self._raised, None
        if error is not None:
            self.answered = self.count
        return error

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
        """Raise `KeyboardInterrupt`, or what a signal handler raised, if an interrupt was not acted on."""
        if self.count > self.answered:
            self.answered = self.count
            raise self.take_raised() or KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            try:  # SIGINT last: one that raises before would leave a handler of ours
                for number, (former, ours) in self._deferred.items():
                    if _handler_of(number) is ours:  # else the program has installed another one since
                        signal.signal(number, former)
            finally:
                self._installed = False
                signal.signal(signal.SIGINT, signal.SIG_DFL if self._previous is None else self._previous)
        if self._raised is not None and self._raised is not value:  # not lost, also if the ranks have failed
            raise self._raised
        if kind is None and not self.handed_over:
            self.check()


__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here


# Session lock: one caller at a time runs something in a session, and only in the process that made it.

POLL_SECONDS = 0.002
"""Between two looks whether the lock was released; only `close` waits for it."""


class SessionLock:
    """A lock that never blocks, counts interrupts while it is held, and can be closed.

    Notes
    -----
    `interrupt` and `close` may be called from any thread.

    An interrupt may come between any two steps, and so may an exception of another signal's handler.  The
    first is only counted before the lock is taken and until it is released.  For the second, taking the lock
    and recording its owner is one step (`dict.setdefault`): the one that leaves knows whether to release it.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        """The process that made it; a forked child cannot hold it."""
        self.closed = False
        self.on_release: Callable[[], None] = lambda: None
        """Called when it was released; from any thread."""
        self._holder: dict[None, InterruptCounter] = {}
        """The interrupt counter of what holds the lock; empty: nothing does."""

    @property
    def held(self) -> bool:
        """Whether something holds it now."""
        return bool(self._holder)

    @contextlib.contextmanager
    def hold(self) -> Iterator[InterruptCounter]:
        """Hold the lock; SIGINT is only counted, and raises at the exit of the block at the latest.

        If the counter is handed over inside of the block, the lock stays held until `release`.

        Raises
        ------
        ForkedRankError, ClosedError
            This is a forked child of the owner; `close` was called, before or inside of the block.
        BusyError
            Another thread holds it, or a cell that runs in the background.
        """
        if os.getpid() != self.pid:
            raise ForkedRankError(
                f"this process ({os.getpid()}) was forked from {self.pid}, which alone may use the session"
            )
        with InterruptCounter() as interrupts:
            try:
                holder = self._holder.setdefault(None, interrupts)
                if self.closed:  # asked only now: `close` waits for those that had asked before it
                    raise ClosedError(STOPPED)
                if holder is not interrupts:
                    interrupts.check()
                    raise BusyError(
                        "the ranks are busy with another cell: wait for it with %parallel_result, or give "
                        "a cell --queue; to stop it, interrupt that wait, or call cancel() of what --async "
                        "returned, or close() of an imap (in Python: session.interrupt())"
                    )
                yield interrupts
            except (ClosedError, ParallelError, CellTimeoutError):
                raise
            except Exception as error:
                if self.closed and self._holder.get(None) is interrupts:
                    raise ClosedError(STOPPED) from error  # its files were closed under it
                raise
            finally:
                if not interrupts.handed_over:
                    self.release(interrupts)

    def release(self, interrupts: InterruptCounter) -> None:
        """Release the lock if it is held with this counter; from any thread."""
        if self._holder.get(None) is interrupts:
            del self._holder[None]
            self.on_release()

    def interrupt(self) -> None:
        """Interrupt, on behalf of the user, what holds the lock; else do nothing."""
        interrupts = self._holder.get(None)
        if interrupts is not None:
            interrupts.add()
            interrupts.end_raising()  # a question to the user ends, too

    def close(self, seconds: float) -> None:
        """Refuse every later `hold`; wait up to `seconds` until the lock is released."""
        self.closed = True
        deadline = time.monotonic() + seconds
        while self._holder and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
