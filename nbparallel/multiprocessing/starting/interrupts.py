"""Interrupts that come at a bad moment: while a worker starts, or just before a system call that waits.

A terminal's Ctrl-C reaches every process of the group, and one that starts has the handler of Python, which
would end it with a traceback.  A signal that is blocked waits: `begin_interrupts` delivers it.

Python runs the handler of a signal between two instructions.  One that comes after the last such check and
before the call sleeps sets a flag that is read when the call ends: the stop button is pressed, and
nothing happens.  The thread may stay there for long, where it gives the lock of the interpreter to another
thread first.  So no wait of the main thread is one long call.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERRUPT = {signal.SIGINT}
_late = threading.local()


@contextmanager
def deferred_sigint() -> Iterator[None]:
    """Have the processes that this thread starts in the block call `begin_interrupts` themselves."""
    before = is_sigint_deferred()
    _late.on = True
    try:
        yield
    finally:
        _late.on = before


def is_sigint_deferred() -> bool:
    """Return whether a process that this thread starts now calls `begin_interrupts` itself."""
    return getattr(_late, "on", False)


@contextmanager
def interrupts_blocked(*, late: bool = True) -> Iterator[None]:
    """Block SIGINT in this thread, if `late`: a process that it starts begins so."""
    if not late:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def are_blocked() -> bool:
    """Return whether SIGINT is blocked in this thread."""
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def begin_interrupts() -> None:
    """Take interrupts from now on, one that came before included."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)


SLICE_SECONDS = 0.2
"""How late an interrupt can be that came at the wrong moment; arbitrary."""


def wait_interruptibly(wait: Callable[[float | None], object], timeout: float | None = None) -> bool:
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
