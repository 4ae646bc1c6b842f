"""Executor: the interface of ``concurrent.futures``, over a pool of ours."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing import pool as library
from multiprocessing import util
from typing import Any, NamedTuple, cast

from nbparallel.multiprocessing.messages.parcels import ArgumentCache
from nbparallel.multiprocessing.starting.process_state import (
    BEFORE_CHILDREN,
    default_context,
    wait_interruptibly,
)
from nbparallel.multiprocessing.workers.call_pool import CallPool
from nbparallel.wire.system import affine_cpus


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
        elif self._engine.is_own_thread():
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
            for worker in self._engine.workers() if kill else ():
                worker.kill()
            self._engine.terminate()


def register_joblib() -> None:
    """Let joblib use processes of ours: ``joblib.parallel_config(backend="nbparallel")``.

    So does scikit-learn where it takes ``n_jobs``.  Functions and classes of ``__main__`` travel by value,
    shared arrays as the same memory; a private array of 256 KiB and more is copied once for a call of
    `joblib.Parallel`, and each task maps that copy copy-on-write.  A worker that dies is a `WorkerDiedError`.
    Workers are kept for the next call.  Its own tasks, workers of pools and ranks know it without a call.

    Raises
    ------
    ImportError
        joblib is not installed.
    """
    from joblib.parallel import register_parallel_backend

    from nbparallel.multiprocessing.workers.joblib_backend import NbparallelBackend

    register_parallel_backend("nbparallel", NbparallelBackend)
