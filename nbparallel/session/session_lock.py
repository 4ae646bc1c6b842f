"""Session lock: one caller at a time runs something in a session, and only in the process that made it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from nbparallel.errors import BusyError, ClosedError, ForkedRankError
from nbparallel.session.interrupts import InterruptCounter

__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here


class SessionLock:
    """A lock that never blocks, counts interrupts while it is held, and can be closed.

    Notes
    -----
    `interrupt` and `close` may be called from any thread.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        """The process that made it; a forked child cannot hold it."""
        self.closed = False
        self._lock = threading.Lock()
        self._interrupts: InterruptCounter | None = None

    @contextlib.contextmanager
    def hold(self) -> Iterator[InterruptCounter]:
        """Hold the lock; SIGINT is only counted, and raises at the exit of the block at the latest.

        If the counter is handed over inside of the block, the lock stays held until `release`.

        Raises
        ------
        ForkedRankError, ClosedError
            This is a forked child of the owner; `close` was called.
        BusyError
            Another thread holds it, or a cell that runs in the background.
        """
        if os.getpid() != self.pid:
            raise ForkedRankError(
                f"this process ({os.getpid()}) was forked from {self.pid}, which alone may use the session"
            )
        if self.closed:
            raise ClosedError("this session was stopped; make a new one")
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "the ranks are busy with another cell: wait for it with %parallel_result; to stop it, "
                "interrupt that wait, or call cancel() of what --async returned (in Python: "
                "session.interrupt())"
            )
        interrupts = InterruptCounter()
        try:
            with interrupts:  # no KeyboardInterrupt at an arbitrary place of ours
                self._interrupts = interrupts
                yield interrupts
        finally:
            if not interrupts.handed_over:
                self.release()

    def release(self) -> None:
        """Release a lock whose interrupt counter was handed over; from any thread."""
        self._interrupts = None
        self._lock.release()

    def interrupt(self) -> None:
        """Interrupt, on behalf of the user, what holds the lock; else do nothing."""
        interrupts = self._interrupts
        if interrupts is not None:
            interrupts.add()

    def close(self, seconds: float) -> None:
        """Refuse every later `hold`; wait up to `seconds` until the lock is released."""
        self.closed = True
        if self._lock.acquire(timeout=seconds):
            self._lock.release()
