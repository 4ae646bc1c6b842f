"""Tending: memory goes back to the system while notebook or script do nothing."""

from __future__ import annotations

import time

from nbparallel.session.processes.event_loop import EventLoop
from nbparallel.sharing import Store
from nbparallel.sharing.broker import SegmentBroker

PAUSE_SECONDS = 0.05
"""Between two looks at what the supervisor says; nobody waits for this."""


class MemoryReclaimer:
    """Has the session's thread act on what was let go, and empty the pool in time.

    Parameters
    ----------
    fd : int
        Readable when the supervisor has something to say about this process's segments.

    Notes
    -----
    It never waits for a thread that uses the store, and sleeps while nothing is due.
    """

    def __init__(self, pump: EventLoop, store: Store, broker: SegmentBroker, fd: int) -> None:
        self._pump, self._store, self._broker, self._fd = pump, store, broker, fd
        pump.watch(fd, self._on_notice)
        store.pool.on_first.append(self._on_pooled)

    def close(self) -> None:
        """End it; the pump still runs."""
        if self._on_pooled in self._store.pool.on_first:
            self._store.pool.on_first.remove(self._on_pooled)

    def _on_pooled(self) -> None:
        self._pump.call(self._tend)

    def _on_notice(self) -> None:
        # It stays readable while another thread is about to read it.
        self._pump.forget(self._fd)
        self._pump.later(time.monotonic() + PAUSE_SECONDS, self._watch)
        self._tend()

    def _watch(self) -> None:
        if self._store.connected(self._broker):
            self._pump.watch(self._fd, self._on_notice)

    def _tend(self) -> None:
        seconds = self._store.tend()
        if seconds is not None:
            self._pump.later(time.monotonic() + seconds, self._tend)
