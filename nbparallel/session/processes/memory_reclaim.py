"""Memory reclaim: unused memory is returned to the system while the notebook or script is idle."""

from __future__ import annotations

import time

from nbparallel.session.processes.event_loop import EventLoop
from nbparallel.sharing import Store
from nbparallel.sharing.broker import SegmentBroker

PAUSE_SECONDS = 0.05
"""Shortest time between two reads of the supervisor's notices; no thread waits for them."""


class MemoryReclaimer:
    """Handles notices of released segments and trims the memory pool, in the event loop's thread.

    Parameters
    ----------
    fd : int
        Readable when there is a notice about this process's segments.

    Notes
    -----
    It never blocks on a thread that uses the store, and sleeps while nothing is due.
    """

    def __init__(self, event_loop: EventLoop, store: Store, broker: SegmentBroker, fd: int) -> None:
        self._event_loop, self._store, self._broker, self._fd = event_loop, store, broker, fd
        event_loop.watch(fd, self._on_notice)
        store.pool.on_first.append(self._on_pooled)

    def close(self) -> None:
        """Stop; the event loop still runs."""
        if self._on_pooled in self._store.pool.on_first:
            self._store.pool.on_first.remove(self._on_pooled)

    def _on_pooled(self) -> None:
        self._event_loop.call_soon(self._reclaim)

    def _on_notice(self) -> None:
        # It stays readable while another thread is about to read it.
        self._event_loop.unwatch(self._fd)
        self._event_loop.call_at(time.monotonic() + PAUSE_SECONDS, self._watch)
        self._reclaim()

    def _watch(self) -> None:
        if self._store.connected(self._broker):
            self._event_loop.watch(self._fd, self._on_notice)

    def _reclaim(self) -> None:
        seconds = self._store.tend()
        if seconds is not None:
            self._event_loop.call_at(time.monotonic() + seconds, self._reclaim)
