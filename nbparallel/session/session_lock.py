"""Turns: one thing at a time in a session, by the process that made it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from nbparallel.errors import BusyError, ClosedError, ForkedRankError
from nbparallel.session.interrupts import InterruptCounter


class SessionLock:
    """Who may use the ranks now.

    Notes
    -----
    `interrupt` and `close` may be called from any thread.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        """The process that made this; a forked child gets no turn."""
        self.closed = False
        self._lock = threading.Lock()
        self._interrupts: InterruptCounter | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[InterruptCounter]:
        """Hold the turn; SIGINT only counts meanwhile, and raises when it is left at the latest.

        If the presses were handed over meanwhile, the turn stays taken until `give_back`.

        Raises
        ------
        ForkedRankError, ClosedError
            The caller was forked from the owner; `close` was called.
        BusyError
            Another thread has the turn, or a cell that nobody waits for.
        """
        if os.getpid() != self.pid:
            raise ForkedRankError(
                f"this process ({os.getpid()}) was forked from {self.pid}, which alone may use the session"
            )
        if self.closed:
            raise ClosedError("this session was stopped; make a new one")
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "the ranks are busy with another cell: wait for it (%parallel_result), or stop it"
            )
        presses = InterruptCounter()
        try:
            with presses:  # no KeyboardInterrupt at an arbitrary place of ours
                self._interrupts = presses
                yield presses
        finally:
            if not presses.handed_over:
                self.give_back()

    def give_back(self) -> None:
        """End a turn whose presses were handed over; from any thread."""
        self._interrupts = None
        self._lock.release()

    def interrupt(self) -> None:
        """Press, on behalf of the user, whatever has the turn; else do nothing."""
        presses = self._interrupts
        if presses is not None:
            presses.press()

    def close(self, seconds: float) -> None:
        """Give no turn any more; wait up to `seconds` for who has it."""
        self.closed = True
        if self._lock.acquire(timeout=seconds):
            self._lock.release()
