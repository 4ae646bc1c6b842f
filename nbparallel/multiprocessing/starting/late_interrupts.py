"""SIGINT while a worker starts: blocked until it has a handler of its own.

A terminal's Ctrl-C reaches every process of the group, and one that starts has the handler of Python, which
would end it with a traceback.  A signal that is blocked waits: `begin_interrupts` delivers it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_INTERRUPT = {signal.SIGINT}
_late = threading.local()


@contextmanager
def late_interrupts() -> Iterator[None]:
    """Have the processes that this thread starts in the block call `begin_interrupts` themselves."""
    before = starts_late()
    _late.on = True
    try:
        yield
    finally:
        _late.on = before


def starts_late() -> bool:
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
