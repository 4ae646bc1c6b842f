"""Calls of a pool, each with a future.

::

    caller          CallPool.call       a job with its future, in a queue
                      feed                as many calls as there are workers, and one, are with the workers;
                                            the rest of an executor's can be cancelled
    pool's thread   TaskCall._set       the future gets its result, the next call goes to a worker
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing import pool as library
from multiprocessing import sharedctypes, util
from typing import Any

from nbparallel.errors import WorkerDiedError
from nbparallel.errors.questions import class_name, text_of
from nbparallel.multiprocessing.messages.parcels import ArgumentCache, join_household
from nbparallel.multiprocessing.workers.worker_pipes import items_of
from nbparallel.multiprocessing.workers.worker_pool import Pool

_BEFORE_TERMINATION = 16
"""Order of what a process does at its end; 15: the library ends pools."""
_IDLE_SECONDS = 5.0
"""For workers that do nothing to end by themselves."""
_FAILURE_BYTES = 512
"""Of what an initializer raised, as text."""


class TaskCall:
    """A job of a `CallPool`: one call."""

    def __init__(
        self,
        pool: CallPool,
        call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        future: Future[Any],
        name: Callable[[], str],
    ) -> None:
        self.pool: CallPool | None = pool
        self.future, self.name = future, name
        self.items = items_of(*call[:2])
        """How often the user's function is called."""
        self._cache, self._job = pool._cache, next(library.job_counter)  # type: ignore[attr-defined]
        self.task: Any = self._job, 0, *call
        self._cache[self._job] = self

    def begin(self) -> Any:
        """Return what a worker is sent, None if it was cancelled or has failed."""
        if self._job in self._cache and self.future.set_running_or_notify_cancel():
            task, self.task = self.task, None  # it may be large
            return task
        del self._cache[self._job]
        return None

    def _set(self, _index: int, outcome: tuple[bool, Any]) -> None:
        del self._cache[self._job]
        pool, self.pool = self.pool, None  # what waits for the future may be what ends the pool
        if pool is not None:
            pool.feed()
        succeeded, value = outcome
        with suppress(InvalidStateError):  # it waited, and was cancelled
            if succeeded:
                self.future.set_result(value)
            else:
                self.future.set_exception(value)


class CallPool(Pool):
    """The pool under an executor, joblib's backend and a loader: one call at a time, and no end of their own.

    If its workers cannot begin, because its initializer fails, it ends, and `failed` says why.

    Parameters
    ----------
    owner : str
        What its errors call it.
    given
        Parameters of `Pool`, in their order.
    threads : int, optional
        Of each worker's numeric libraries.
    most : int
        Calls that workers have, or get next; further ones can be cancelled.
    """

    failed: WorkerDiedError | None = None
    _says_why = True

    def __init__(
        self,
        owner: str,
        processes: int,
        initializer: Callable[..., Any] | None = None,
        initargs: Iterable[Any] = (),
        max_tasks: int | None = None,
        context: Any = None,
        *,
        threads: int | None = None,
        most: int = sys.maxsize,
    ) -> None:
        self._owner, self._threads, self._most = owner, threads, most
        self._pid, self._member = os.getpid(), join_household()
        self._failure = sharedctypes.RawArray("c", _FAILURE_BYTES)
        self._waiting: deque[TaskCall] = deque()
        self._lock = threading.RLock()
        """Held while a call begins or waits."""
        if initializer is not None:
            initializer, initargs = _begin, (self._failure, initializer, *initargs)
        super().__init__(processes, initializer, initargs, max_tasks, context)
        parts = self._cache, self._pool, self._worker_handler, self._change_notifier  # type: ignore[attr-defined]
        self._end_idle = util.Finalize(self, _end_idle, parts, exitpriority=_BEFORE_TERMINATION)

    @property
    def usable(self) -> bool:
        """Whether this process has started its workers, under the supervisor that it still has."""
        own = self._pid == os.getpid() and self._member is join_household()
        return own and self._state == library.RUN

    def end(self) -> None:
        """End the workers: by themselves if they have nothing to do, else now (idempotent)."""
        if self._pid == os.getpid():
            self._end_idle()
            self.terminate()

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        future: Future[Any],
        *,
        copies: ArgumentCache | None = None,
        name: Callable[[], str] = lambda: "a call",
    ) -> None:
        """Call a function in a worker; of what several such calls hold, `copies` has the copies.

        `name` returns what an error calls it.
        """
        with self._lock:
            self._check_running()
            job = TaskCall(self, (function, args, kwargs), future, name)
            if copies is not None:
                self._pipes.copies[job.task[0]] = copies
            self._waiting.append(job)
            self.feed()

    def feed(self) -> None:
        """Give the workers the next calls."""
        cache, tasks = self._cache, self._taskqueue  # type: ignore[attr-defined]
        with self._lock:
            while self._waiting and len(cache) - len(self._waiting) < self._most:
                job = self._waiting.popleft()
                if (task := job.begin()) is None:
                    continue
                try:
                    if not tasks.empty() or not self._pipes.send_now(task):
                        tasks.put(([task], None))
                except BaseException as error:  # an interrupt, or arguments that another thread changes
                    del cache[job._job]
                    job.future.set_exception(error)
                    if not isinstance(error, Exception):
                        raise

    def cancel(self) -> None:
        """Cancel the calls that no worker can have yet."""
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for job in waiting:
            job.future.cancel()
            job.begin()

    def interrupt(self, *, running: bool = True) -> None:
        """Stop all calls that are under way, or those that have not begun: no one waits for them."""
        self.cancel()
        super().interrupt(running=running)

    def count_ahead(self, ahead: Callable[[], int | None] | None) -> None:
        """Have `ahead` say how many items are to come that the pool has not got; None: all have come."""
        self._cache.ahead = ahead  # type: ignore[attr-defined]

    def workers(self) -> list[Any]:
        """Return the processes."""
        return list(self._pool)  # type: ignore[attr-defined]

    def is_own_thread(self) -> bool:
        """Return whether the thread that calls callbacks asks."""
        return threading.current_thread() is self._result_handler  # type: ignore[attr-defined]

    def _check_running(self) -> None:
        if self.failed is not None:
            raise copy.copy(self.failed)
        if self._state != library.RUN:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def reported_failure(self) -> str:
        """Return what the initializer of a worker has raised."""
        text: str = self._failure.value.decode(errors="replace")
        return text

    def fail(self, error: WorkerDiedError) -> None:
        """Let all calls fail and end: workers that were started anew would fail again."""
        self.failed = error
        super().fail(error)
        self.terminate()


def _end_idle(cache: Any, workers: list[Any], handler: Any, notifier: Any) -> None:
    """Let workers that do nothing end by themselves: what they have made, such as a lock, is then removed."""
    if cache or handler._state != library.RUN:
        return
    handler._state = library.CLOSE
    notifier.put(None)
    end = time.monotonic() + _IDLE_SECONDS
    for one in (handler, *workers):
        if one is not threading.current_thread():
            one.join(max(0.0, end - time.monotonic()))


def _begin(failure: Any, initializer: Callable[..., object], *args: Any) -> None:
    try:
        initializer(*args)
    except BaseException as error:
        logging.getLogger("concurrent.futures").critical("Exception in initializer:", exc_info=True)
        failure.value = f"{class_name(error)}: {text_of(error)}".encode()[: _FAILURE_BYTES - 1]
        raise SystemExit(1) from None


class IdlePool:
    """The pool that no one uses: at most one, whose workers have imported what the last use needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[Any, CallPool]] = []

    def take(self, kind: object = None) -> CallPool | None:
        """Return the pool if it can be used and is of that kind; another one is ended."""
        for other, pool in self._replace():
            if other == kind and pool.usable:
                return pool
            pool.end()
        return None

    def keep(self, pool: CallPool, kind: object = None) -> None:
        """Keep a pool for the next use, instead of another."""
        for _, other in self._replace((kind, pool)):
            other.end()

    def close(self) -> None:
        """End it."""
        for _, pool in self._replace():
            pool.end()

    def _replace(self, *others: tuple[Any, CallPool]) -> list[tuple[Any, CallPool]]:
        with self._lock:
            kept, self._kept = self._kept, list(others)
        return kept
