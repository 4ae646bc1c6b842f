"""Session lock: one caller at a time runs something in a session, and only in the process that made it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from nbparallel.errors import (
    STOPPED,
    BusyError,
    CellTimeoutError,
    ClosedError,
    ForkedRankError,
    ParallelError,
)
from nbparallel.session.interrupts import InterruptCounter

__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here
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
                        "returned (in Python: session.interrupt())"
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

    def interrupt(self) -> None:
        """Interrupt, on behalf of the user, what holds the lock; else do nothing."""
        interrupts = self._holder.get(None)
        if interrupts is not None:
            interrupts.add()

    def close(self, seconds: float) -> None:
        """Refuse every later `hold`; wait up to `seconds` until the lock is released."""
        self.closed = True
        deadline = time.monotonic() + seconds
        while self._holder and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
