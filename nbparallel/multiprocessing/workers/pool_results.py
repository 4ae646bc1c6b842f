"""Results of a pool's jobs: the library's, whose waits can be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from multiprocessing import pool as library
from typing import Any

from nbparallel.multiprocessing.starting.sliced_waits import wait_in_slices
from nbparallel.multiprocessing.workers.dead_workers import fail_all, fail_jobs
from nbparallel.multiprocessing.workers.task_interrupts import INTERRUPTED


def interrupt(pool: Any) -> None:
    """Stop all tasks of a pool that are under way: a wait for one was interrupted."""
    number = next(library.job_counter)  # type: ignore[attr-defined]
    pool._quick_put.drop_jobs(list(pool._cache))
    pool._interrupt_word.interrupt(number, list(pool._pool))
    fail_all(pool, CancelledError(INTERRUPTED))


def report_callbacks(job: Any) -> None:
    """Have what a job's callbacks raise shown, as a thread's is; it would end the thread of all results."""
    for name in ("_callback", "_error_callback"):
        if (callback := getattr(job, name, None)) is not None:
            setattr(job, name, partial(_reported, callback))


def _reported(callback: Callable[[Any], object], value: Any) -> None:
    try:
        callback(value)
    except Exception as error:  # noqa: BLE001  whatever the user's code raises
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))


TERMINATED = (
    "the pool was terminated before this task had ended: a pool's `with` block terminates it at its end, so "
    "get all results inside the block, or call close() and join() there"
)
"""What tasks raise that were under way."""


def end_jobs(pool: Any) -> None:
    """Let what is under way in a pool that was terminated fail: no result would come any more."""
    jobs = [job for job in pool._cache.values() if not _has_result(job)]
    for job in jobs:
        job._error_callback = None  # as in the library; it may be what terminates the pool
        fail_jobs([job], CancelledError(TERMINATED))  # each is raised with a traceback of its own


def _has_result(job: Any) -> bool:
    """Whether a job has ended: its callback is under way, which may have called `terminate`."""
    if hasattr(job, "_number_left"):
        return not job._number_left
    return hasattr(job, "_success")


@contextmanager
def interrupting(pool: Any) -> Iterator[None]:
    """Stop a pool's tasks if what is done in the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        interrupt(pool)
        raise


def _wait(results: Any, wait: Callable[[float | None], object], timeout: float | None) -> None:
    pool = results._pool  # none is left when the job has ended
    try:  # no context manager: it costs 2 us a result
        wait_in_slices(wait, timeout)
    except KeyboardInterrupt:
        if pool is not None:
            interrupt(pool)
        raise


class PoolResult(library.ApplyResult):  # type: ignore[type-arg]
    """Of one call."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the result, at most `timeout` seconds; an interrupt stops the pool's tasks."""
        if not self.ready():
            _wait(self, self._event.wait, timeout)  # type: ignore[attr-defined]


class PoolMapResult(library.MapResult):  # type: ignore[type-arg]
    """Of a call for each item."""

    wait = PoolResult.wait


def _next(results: Any, timeout: float | None) -> Any:
    """Wait until the next result is there, or it is known that none comes; return it."""

    def wait(seconds: float | None) -> object:
        with results._cond:
            return results._items or results._index == results._length or results._cond.wait(seconds)

    if not results._items:
        _wait(results, wait, timeout)
    # Not `super().next`: the class is another one when the iteration has failed while it waited.
    return library.IMapIterator.next(results, None if timeout is None else 0)


class PoolIterator(library.IMapIterator):  # type: ignore[type-arg]
    """Results in order."""

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result; an interrupt of the wait stops the pool's tasks."""
        return _next(self, timeout)

    __next__ = next


class UnorderedPoolIterator(library.IMapUnorderedIterator):  # type: ignore[type-arg]
    """Results as they come."""

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result; an interrupt of the wait stops the pool's tasks."""
        return _next(self, timeout)

    __next__ = next


INTERRUPTIBLE: dict[type, type] = {
    library.ApplyResult: PoolResult,
    library.MapResult: PoolMapResult,
    library.IMapIterator: PoolIterator,
    library.IMapUnorderedIterator: UnorderedPoolIterator,
}
"""The library's class -> ours."""
