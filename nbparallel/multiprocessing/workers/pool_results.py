"""Results of a pool's jobs: the library's, whose waits can be interrupted."""

from __future__ import annotations

from concurrent.futures import CancelledError
from multiprocessing import pool as library
from typing import Any

from nbparallel.multiprocessing.workers.dead_workers import fail_all
from nbparallel.multiprocessing.workers.task_interrupts import INTERRUPTED


def interrupt(pool: Any | None) -> None:
    """Stop all tasks of a pool that are under way: a wait for one was interrupted."""
    if pool is not None:
        number = next(library.job_counter)  # type: ignore[attr-defined]
        pool._quick_put.drop_jobs(list(pool._cache))
        pool._interrupt_word.interrupt(number, list(pool._pool))
        fail_all(pool, CancelledError(INTERRUPTED))


class PoolResult(library.ApplyResult):  # type: ignore[type-arg]
    """Of one call."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the result, at most `timeout` seconds; an interrupt stops the pool's tasks."""
        pool = self._pool  # type: ignore[attr-defined]  # none is left when the job has ended
        try:
            super().wait(timeout)
        except KeyboardInterrupt:
            interrupt(pool)
            raise


class PoolMapResult(library.MapResult):  # type: ignore[type-arg]
    """Of a call for each item."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all results, at most `timeout` seconds; an interrupt stops the pool's tasks."""
        pool = self._pool  # type: ignore[attr-defined]  # none is left when the job has ended
        try:
            super().wait(timeout)
        except KeyboardInterrupt:
            interrupt(pool)
            raise


class PoolIterator(library.IMapIterator):  # type: ignore[type-arg]
    """Results in order."""

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result; an interrupt of the wait stops the pool's tasks."""
        pool = self._pool  # type: ignore[attr-defined]  # none is left when the job has ended
        try:
            return super().next(timeout)
        except KeyboardInterrupt:
            interrupt(pool)
            raise

    __next__ = next


class UnorderedPoolIterator(library.IMapUnorderedIterator):  # type: ignore[type-arg]
    """Results as they come."""

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result; an interrupt of the wait stops the pool's tasks."""
        pool = self._pool  # type: ignore[attr-defined]  # none is left when the job has ended
        try:
            return super().next(timeout)
        except KeyboardInterrupt:
            interrupt(pool)
            raise

    __next__ = next


INTERRUPTIBLE: dict[type, type] = {
    library.ApplyResult: PoolResult,
    library.MapResult: PoolMapResult,
    library.IMapIterator: PoolIterator,
    library.IMapUnorderedIterator: UnorderedPoolIterator,
}
"""The library's class -> ours."""
