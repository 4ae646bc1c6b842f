"""Executor: the interface of ``concurrent.futures``, over a pool of ours.

::

    caller          Executor.submit     a future, in the queue of its `_Calls`
                      _Calls._feed      as many calls as there are workers, and one, are in the pool: the rest
                                          can be cancelled
    pool's thread   _Calls._settle      the future gets its result, the next call goes to the pool
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future
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
from nbparallel.multiprocessing.workers.worker_pipes import items_of
from nbparallel.multiprocessing.workers.worker_pool import CallPool, interrupt
from nbparallel.wire.system import affine_cpus


class InterruptibleFuture(Future):  # type: ignore[type-arg]
    """A call's result; an interrupt of a wait for it stops all calls of its executor."""

    def __init__(self, calls: weakref.ref[_Calls]) -> None:
        super().__init__()
        self._calls = calls

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
            if (calls := self._calls()) is not None:
                calls.interrupt()
            raise
        return wait(None if ended else 0)

    def _done_within(self, seconds: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(self.done, seconds)


class _Waiting(NamedTuple):
    """A call that no worker can have yet."""

    future: InterruptibleFuture
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    copies: ArgumentCache | None


class _MappedFunction(NamedTuple):
    """In place of a function that `Executor.map` calls, until a call is submitted."""

    function: Callable[..., Any]
    copies: ArgumentCache


class _Calls:
    """The calls of an executor, and the pool that makes them; it lives until all have ended."""

    def __init__(self, make_pool: Callable[[], CallPool], workers: int) -> None:
        self._make_pool, self._most = make_pool, workers + 1
        self.pid = os.getpid()
        self.ref = weakref.ref(self)
        self._engine: CallPool | None = None
        self._waiting: deque[_Waiting] = deque()
        self._given: set[InterruptibleFuture] = set()
        """Of calls that the pool has."""
        self._shut = False
        self._changed = threading.Condition(threading.RLock())

    def submit(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InterruptibleFuture:
        """Take a call."""
        copies = None
        if isinstance(function, _MappedFunction):
            function, copies = function
        future = InterruptibleFuture(self.ref)
        with self._changed:
            if self._shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if _ended["program"]:
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            if self._engine is None:
                self._engine = self._make_pool()
                self._engine.count_ahead(partial(_ahead, self.ref))
                _living[id(self)] = self
            if self._engine.failed is not None:
                raise copy.copy(self._engine.failed)
            self._waiting.append(_Waiting(future, (function, args, kwargs), copies))
            self._feed()
        return future

    def _feed(self) -> None:
        """Give the pool the next calls; the lock is held."""
        while self._waiting and len(self._given) < self._most and self._engine is not None:
            future, call, copies = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                self._given.add(future)
                self._engine.call(*call, partial(self._settle, future), copies=copies)
            except BaseException as error:
                self._given.discard(future)
                future.set_exception(error)
                if not isinstance(error, Exception):  # an interrupt of the thread that submits
                    raise
        if not self._given and not self._waiting:
            self._changed.notify_all()

    def _settle(self, future: InterruptibleFuture, succeeded: bool, value: Any) -> None:
        try:
            with self._changed:
                self._given.discard(future)
                self._feed()
        finally:
            if future.done():  # its submission was interrupted when it had been sent
                pass
            elif succeeded:
                future.set_result(value)
            else:
                future.set_exception(value)

    def interrupt(self) -> None:
        """Stop all calls under way: a wait for one was interrupted."""
        with self._changed:
            self.cancel()
            if self._engine is not None:
                interrupt(self._engine)

    def cancel(self) -> None:
        """Cancel the calls that no worker can have yet."""
        if self.pid != os.getpid():
            return
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        for one in waiting:
            if one.future.cancel():
                one.future.set_running_or_notify_cancel()

    def _have_ended_within(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._given and not self._waiting, seconds)

    def shut(self) -> None:
        """Take no more calls."""
        if self.pid != os.getpid():  # a thread that this forked child has not may hold the lock
            self._shut = True
            return
        with self._changed:
            self._shut = True

    def end(self) -> None:
        """Wait until all calls have ended, then end the workers (idempotent)."""
        self.shut()
        if self.pid != os.getpid() or self._engine is None:
            return
        if self._engine.is_own_thread() and not self._have_ended_within(0):
            raise RuntimeError("a callback cannot wait for the other calls: write shutdown(wait=False)")
        try:
            wait_interruptibly(self._have_ended_within)
        except KeyboardInterrupt:
            self.interrupt()
            raise
        self._engine.close()
        self._engine.join()
        _living.pop(id(self), None)

    def terminate(self, *, kill: bool) -> None:
        """End the workers now."""
        self.shut()
        self.cancel()
        if self.pid != os.getpid() or self._engine is None or id(self) not in _living:
            return
        engine: Any = self._engine
        for worker in list(engine._pool) if kill else ():
            worker.kill()
        engine.terminate()
        self.end_soon()

    def end_soon(self) -> None:
        """Do that in another thread, which the program waits for at its end."""
        self.shut()
        if self.pid != os.getpid() or self._engine is None or id(self) not in _living:
            return
        if not util.is_exiting():
            with contextlib.suppress(RuntimeError):  # no further thread can be started
                threading.Thread(target=self.end, name="end of an executor").start()
                return
        self.end()


def _ahead(calls: weakref.ref[_Calls]) -> int:
    """Return how many items wait in an executor."""
    waiting = () if (found := calls()) is None else list(found._waiting)
    return sum(items_of(*one.call[:2]) for one in waiting)


_living: dict[int, _Calls] = {}
"""Those that have a pool, by identity."""
_ended = {"program": False}


def _end_all() -> None:
    _ended["program"] = True
    for calls in list(_living.values()):
        calls.end()


threading._register_atexit(_end_all)  # type: ignore[attr-defined]  # before daemonic processes are ended


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
        self._make_calls = partial(_Calls, partial(CallPool, "executor", *given, threads=threads), workers)
        self._begin()

    def _begin(self) -> None:
        self._calls: _Calls = self._make_calls()
        # a process of another library waits for its children before its threads end, one of which ends them
        util.Finalize(self, self._calls.end_soon, exitpriority=BEFORE_CHILDREN)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a worker; return immediately.

        Raises
        ------
        WorkerDiedError
            The initializer has failed: make a new executor.
        RuntimeError
            The executor was shut down.
        """
        if self._calls.pid != os.getpid():  # a forked child has none of its threads
            self._begin()
        return self._calls.submit(fn, args, kwargs)

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
        self._calls.shut()
        if cancel_futures:
            self._calls.cancel()
        if wait:
            self._calls.end()
        else:
            self._calls.end_soon()

    def terminate_workers(self) -> None:
        """End the workers now, as since CPython 3.14; calls that have not ended raise `CancelledError`."""
        self._calls.terminate(kill=False)

    def kill_workers(self) -> None:
        """Kill the workers; as `terminate_workers`."""
        self._calls.terminate(kill=True)


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
