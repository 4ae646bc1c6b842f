"""Calls of a pool, each with a future; and Executor, which has the interface of ``concurrent.futures``.

::

    caller          CallPool.call       a job with its future, in a queue
                      feed                as many calls as there are workers, and one, are with the workers;
                                            the rest of an executor's can be cancelled
    pool's thread   TaskCall._set       the future gets its result, the next call goes to a worker
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from multiprocessing import pool as library, sharedctypes, util
from typing import Any, NamedTuple, cast

from nbparallel.errors import WorkerDiedError
from nbparallel.errors.questions import class_name, text_of
from nbparallel.multiprocessing.messages.parcels import ArgumentCache, join_household
from nbparallel.multiprocessing.starting.process_state import (
    BEFORE_CHILDREN,
    default_context,
    wait_interruptibly,
)
from nbparallel.multiprocessing.workers.worker_pipes import items_of
from nbparallel.multiprocessing.workers.worker_pool import Pool
from nbparallel.wire.system import affine_cpus

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


# Executor: the interface of ``concurrent.futures``, over a pool of ours.


class InterruptibleFuture(Future):  # type: ignore[type-arg]
    """A call's result; an interrupt of a wait for it stops all calls of its executor."""

    def __init__(self, pool: CallPool) -> None:
        super().__init__()
        self._engine = weakref.ref(pool)

    def result(self, timeout: float | None = None) -> Any:
        """Return what the call returned, or raise what it raised."""
        return self._wait(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the call raised, None if nothing."""
        error: BaseException | None = self._wait(super().exception, timeout)
        return error

    def _wait(self, wait: Callable[[float | None], Any], timeout: float | None) -> Any:
        if self.done():
            return wait(timeout)
        try:
            ended = wait_interruptibly(self._done_within, timeout)
        except KeyboardInterrupt:
            if (pool := self._engine()) is not None:
                pool.interrupt()
            raise
        return wait(None if ended else 0)

    def _done_within(self, seconds: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(self.done, seconds)


class _MappedFunction(NamedTuple):
    """In place of a function that `Executor.map` calls, until a call is submitted."""

    function: Callable[..., Any]
    copies: ArgumentCache


def _end_soon(pool: CallPool) -> None:
    """End the workers when all calls have ended, in a thread that the program waits for at its end."""
    if pool._state != library.RUN:
        return
    pool.close()
    if not util.is_exiting():
        with suppress(RuntimeError):  # no further thread can be started
            threading.Thread(target=pool.join, name="end of an executor").start()
            return
    pool.join()


class Executor(futures.Executor):
    """Calls functions in other processes; arrays, and what ``__main__`` defines, travel as through a `Queue`.

    Parameters
    ----------
    max_workers : int, optional
        By default one for each CPU.
    mp_context : context, optional
        Of `get_context`; by default the one that is used.
    initializer, initargs : callable, tuple
        Called in each worker before its first call.  Locks and queues travel here, not in a call.
    max_tasks_per_child : int, optional
        After how many calls a worker is replaced; not with ``fork``, and by default with ``spawn``.
    threads : int, optional
        Of each worker's numeric libraries.  By default its share of the CPUs, as for a rank, unless the
        environment says how many.

    Notes
    -----
    ``submit``, ``map`` and ``shutdown`` are the library's, and so is what a function raises: its own
    exception, with the worker's traceback as cause.  A worker that dies costs the call that it ran, which
    raises a `WorkerDiedError`; another takes over.  If the initializer fails, all calls do.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        threads: int | None = None,
    ) -> None:
        method = None if max_tasks_per_child is None else "spawn"  # the library's choice
        if mp_context is not None:  # the library's own stands for ours
            method = mp_context.get_start_method()
        context = default_context().get_context(method)
        if max_workers is not None and max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if max_tasks_per_child is not None:
            if not isinstance(max_tasks_per_child, int):
                raise TypeError("max_tasks_per_child must be an integer")
            if max_tasks_per_child <= 0:
                raise ValueError("max_tasks_per_child must be >= 1")
            if method == "fork":
                raise ValueError(
                    "max_tasks_per_child is incompatible with the 'fork' multiprocessing start method; "
                    "supply a different mp_context."
                )
        workers = self._max_workers = max_workers or affine_cpus()  # Dask and others read it
        self._mp_context = context
        given = workers, initializer, initargs, max_tasks_per_child, context
        self._make_pool = partial(CallPool, "executor", *given, threads=threads, most=workers + 1)
        self._shut = False
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._engine: CallPool | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a worker; return immediately.

        Raises
        ------
        WorkerDiedError
            The initializer has failed: make a new executor.
        RuntimeError
            The executor was shut down.
        """
        if self._pid != os.getpid():  # a forked child has none of its threads
            self._begin()
        with self._lock:
            if self._shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._engine is None:
                self._engine = self._make_pool()
                # when nothing holds this object any more, or before its process waits for its children
                util.Finalize(self, _end_soon, (self._engine,), exitpriority=BEFORE_CHILDREN)
        function: Any = fn
        copies = None
        if isinstance(function, _MappedFunction):
            function, copies = function
        future = InterruptibleFuture(self._engine)
        self._engine.call(function, args, kwargs, future, copies=copies)
        return future

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **options: Any,
    ) -> Iterator[Any]:
        """Call a function with an element of each iterable; return an iterator over the results, in order.

        Parameters
        ----------
        timeout, chunksize, buffersize
            As in the library.

        Notes
        -----
        A private array in several calls is copied once, unless `buffersize` is given.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if options.get("buffersize") is None:
            calls = list(zip(*iterables, strict=False))
            iterables, copies = tuple(zip(*calls, strict=True)) or ((),), ArgumentCache(calls)
        else:
            copies = None
        if chunksize > 1:
            arguments = zip(*iterables, strict=False)
            chunks = iter(lambda: tuple(itertools.islice(arguments, chunksize)), ())
            fn, iterables = library.starmapstar, (zip(itertools.repeat(fn), chunks, strict=False),)  # type: ignore[attr-defined]
        if copies is not None:
            fn = cast("Callable[..., Any]", _MappedFunction(fn, copies))
        found = super().map(fn, *iterables, timeout=timeout, **options)
        return itertools.chain.from_iterable(found) if chunksize > 1 else found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait for those under way, and for the end of the workers, if `wait`."""
        self._shut = True
        if self._engine is None or self._pid != os.getpid():
            return
        if cancel_futures:
            self._engine.cancel()
        if not wait:
            _end_soon(self._engine)
        elif threading.current_thread() is self._engine._result_handler:  # type: ignore[attr-defined]
            raise RuntimeError("a callback cannot wait for the other calls: write shutdown(wait=False)")
        else:
            self._engine.close()
            self._engine.join()

    def terminate_workers(self) -> None:
        """End the workers now, as since CPython 3.14; calls that have not ended raise `CancelledError`."""
        self._terminate(kill=False)

    def kill_workers(self) -> None:
        """Kill the workers; as `terminate_workers`."""
        self._terminate(kill=True)

    def _terminate(self, *, kill: bool) -> None:
        self._shut = True
        if self._engine is not None and self._pid == os.getpid():
            self._engine.cancel()
            for worker in list(self._engine._pool) if kill else ():  # type: ignore[attr-defined]
                worker.kill()
            self._engine.terminate()
