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

    def __init__(self, event_loop: EventLoop, store: Store, broker: SegmentBroker, fd: int) -> None:
        self._event_loop, self._store, self._broker, self._fd = event_loop, store, broker, fd
        event_loop.watch(fd, self._on_notice)
        store.pool.on_first.append(self._on_pooled)

    def close(self) -> None:
        """End it; the pump still runs."""
        if self._on_pooled in self._store.pool.on_first:
            self._store.pool.on_first.remove(self._on_pooled)

    def _on_pooled(self) -> None:
        self._event_loop.call(self._tend)

    def _on_notice(self) -> None:
        # It stays readable while another thread is about to read it.
        self._event_loop.forget(self._fd)
        self._event_loop.later(time.monotonic() + PAUSE_SECONDS, self._watch)
        self._tend()

    def _watch(self) -> None:
        if self._store.connected(self._broker):
            self._event_loop.watch(self._fd, self._on_notice)

    def _tend(self) -> None:
        seconds = self._store.tend()
        if seconds is not None:
            self._event_loop.later(time.monotonic() + seconds, self._tend)
