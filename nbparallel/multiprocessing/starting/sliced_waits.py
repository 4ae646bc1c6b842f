"""Waits of the main thread, in slices: an interrupt may come just before the system call that waits.

Python runs the handler of a signal between two instructions.  One that comes after the last such check and
before the call sleeps sets a flag that is read when the call ends: the stop button is pressed, and
nothing happens.  The thread may stay there for long, where it gives the lock of the interpreter to another
thread first.  So no wait of the main thread is one long call.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

SLICE_SECONDS = 0.2
"""How late an interrupt can be that came at the wrong moment; arbitrary."""


def wait_in_slices(wait: Callable[[float | None], object], timeout: float | None = None) -> bool:
    """Return what `wait` does, which is called with a number of seconds until it returns true.

    Parameters
    ----------
    wait : callable
        Waits at most as many seconds as it is given, None: as long as it takes.
    timeout : float, optional
        Seconds after which the last call's False is returned.
    """
    if threading.current_thread() is not threading.main_thread():
        return bool(wait(timeout))
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        if wait(min(left, SLICE_SECONDS)):
            return True
        if deadline is not None and left <= SLICE_SECONDS:
            return False


def is_readable_within(descriptor: int, seconds: float | None) -> bool:
    """Wait until a descriptor can be read, at most some seconds; return whether it can."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))
