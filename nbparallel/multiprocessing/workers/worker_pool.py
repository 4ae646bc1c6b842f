"""Pools that survive their workers."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from multiprocessing import pool as library
from multiprocessing import sharedctypes, util
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import Any, NamedTuple

from nbparallel.errors import WorkerDiedError
from nbparallel.errors.questions import class_name, text_of
from nbparallel.multiprocessing.connection import Pipe
from nbparallel.multiprocessing.messages.parcels import ArgumentCache
from nbparallel.multiprocessing.starting.process_state import (
    argument_tuple,
    concrete_context,
    wait_interruptibly,
    watch_end,
)
from nbparallel.multiprocessing.workers.dead_workers import end_processes, fail_all, fail_jobs, settle
from nbparallel.multiprocessing.workers.item_progress import ItemProgress
from nbparallel.multiprocessing.workers.task_interrupts import (
    INTERRUPTED,
    InterruptWord,
    TaskInterrupts,
    WorkerGiven,
    run_worker,
)
from nbparallel.multiprocessing.workers.worker_pipes import WorkerPipe, WorkerPipes, items_of


def interrupt(pool: Any, *, running: bool = True) -> None:
    """Stop all tasks of a pool that are under way, or those that have not begun: no one waits for them."""
    number = next(library.job_counter)  # type: ignore[attr-defined]
    pool._pipes.drop_jobs(list(pool._cache))
    pool._interrupt_word.interrupt(number, list(pool._pool) if running else ())
    fail_all(pool, CancelledError(INTERRUPTED))


def report_callbacks(job: Any) -> None:
    """Have what a job's callbacks raise shown, as a thread's is; it would end the thread of all results."""
    for name in ("_callback", "_error_callback"):
        if (callback := getattr(job, name, None)) is not None:
            setattr(job, name, partial(reported, callback))


def reported(callback: Callable[..., object], *values: Any) -> None:
    """Call a callback; what it raises is shown."""
    try:
        callback(*values)
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
        wait_interruptibly(wait, timeout)
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


def _end(results: Any, error: BaseException) -> None:
    """Let an iteration end with an error, whatever length the task thread finds out later."""
    with results._cond:
        results._unsorted.clear()
        results._items.append((False, error))
        results.has_failed, results._pool = True, None
        del results._cache[results._job]
        results._cond.notify()


class _Interruptible:
    """Results of an iteration, an interrupt of whose wait stops the pool's tasks."""

    has_failed = False

    def next(self: Any, timeout: float | None = None) -> Any:
        """Wait until the next result is there, or it is known that none comes; return it."""

        def wait(seconds: float | None) -> object:
            with self._cond:
                known = self._items or self.has_failed or self._index == self._length
                return known or self._cond.wait(seconds)

        if not self._items:
            _wait(self, wait, timeout)
        if self.has_failed and not self._items:
            raise StopIteration
        return library.IMapIterator.next(self, None if timeout is None else 0)

    __next__ = next

    end = _end


class PoolIterator(_Interruptible, library.IMapIterator):  # type: ignore[type-arg]
    """Results in order."""


class UnorderedPoolIterator(_Interruptible, library.IMapUnorderedIterator):  # type: ignore[type-arg]
    """Results as they come."""


INTERRUPTIBLE: dict[type, type] = {
    library.ApplyResult: PoolResult,
    library.MapResult: PoolMapResult,
    library.IMapIterator: PoolIterator,
    library.IMapUnorderedIterator: UnorderedPoolIterator,
}
"""The library's class -> ours."""


_LOOK_SECONDS = 0.05
"""Between two looks whether the result thread has ended before the workers; arbitrary."""
_BEFORE_TERMINATION = 16
"""Order of what a process does at its end; 15: the library ends pools."""
_IDLE_SECONDS = 5.0
"""For workers that do nothing to end by themselves."""
_GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL, as a rank has after an interrupt."""
_FAILURE_BYTES = 512
"""Of what an initializer raised, as text."""
_LOOKED_AT = (list, tuple, range)
"""Of which a call looks for arrays that occur once: what iterating over others does is unknown."""


class _Cache(library._PoolCache):  # type: ignore[name-defined,misc]
    """Jobs under way; one that has failed as a whole may be taken out again."""

    pipes: WorkerPipes
    ahead: Callable[[], int | None] | None = None
    """Returns how many items an executor, joblib or a loader will give to the pool; None: unknown."""

    def remaining(self) -> int | None:
        """Return how many items will come without a call of the pool; None: unknown."""
        if any(getattr(result, "_length", 0) is None for result in list(self.values())):
            return None  # what imap iterates over has not ended
        return 0 if self.ahead is None else self.ahead()

    def __setitem__(self, job: int, result: Any) -> None:
        if not self.keys():
            self.pipes.progress = ItemProgress(self)
        self.pipes.progress.expected += getattr(result, "items", 0)
        result.__class__ = INTERRUPTIBLE.get(type(result), type(result))
        report_callbacks(result)
        super().__setitem__(job, result)

    handler: Any
    """The thread that replaces workers, and ends when the pool is closed and nothing is under way."""

    def __delitem__(self, job: int) -> None:
        self.pop(job, None)
        if not self.keys():
            self.pipes.progress.ended_ns = time.monotonic_ns()
        if not self.keys() and self.handler._state != library.RUN:
            self.notifier.put(None)


class _OneCall(NamedTuple):
    """In place of the function that works on a chunk, in the process that sends the chunks."""

    mapper: Any
    copies: ArgumentCache | None


class Pool(library.Pool):
    """A pool of processes, whose tasks and results travel our way.

    A worker that dies costs the task that it had, which raises `WorkerDiedError`; one that waited costs
    nothing.  The pool goes on.
    """

    _threads: int | None = None
    """Of each worker's numeric libraries; None: its share of the CPUs."""
    _owner = "pool"
    """In whose name it speaks of its workers."""
    _failed_starts = 0
    """Workers that have died one after the other before any has begun."""
    _state: str = library.INIT
    """As the library has it; here for one whose making is interrupted."""

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: Any = None,
    ) -> None:
        self._pipes = pipes = WorkerPipes(maxtasksperchild)
        self._interrupt_word = word = InterruptWord()
        self_ = weakref.ref(self)  # what the library's threads hold must not keep the pool
        count, threads = processes or os.cpu_count() or 1, self._threads
        says_why = isinstance(self, CallPool)

        def start_worker(ctx: Any, *, target: Any, args: Any) -> Any:
            _, _, *rest = args
            given = WorkerGiven(TaskInterrupts(word), pipes.free_place(), count, threads)
            pools_end, workers_end = Pipe()
            siblings = [*pipes.ends(), pools_end] if ctx.get_start_method() == "fork" else ()
            begun = sharedctypes.RawValue("q", 0)
            pipe = WorkerPipe(workers_end, begun, given.interrupts, siblings, says_why=says_why)
            process = ctx.Process(target=run_worker, args=(given, target, pipe, pipe, *rest))
            process.defers_sigint = True
            pipes.add(process, pools_end, begun, given.place)
            watch_end(process, partial(_note_end, pipes, self_))
            return process

        self.Process = start_worker  # type: ignore[method-assign]
        try:
            super().__init__(
                processes, initializer, initargs, maxtasksperchild, context or concrete_context()
            )
        except BaseException:  # an interrupt: what has begun has no other end
            begun = vars(self)
            for handler in ("_worker_handler", "_task_handler", "_result_handler"):
                if handler in begun:
                    begun[handler]._state = library.TERMINATE
            end_processes(begun.get("_pool", ()), _IDLE_SECONDS)
            raise
        self._cache.__class__ = _Cache  # type: ignore[attr-defined]
        self._cache.handler = self._worker_handler  # type: ignore[attr-defined]
        self._cache.pipes = pipes  # type: ignore[attr-defined]

    def __del__(self, is_finalizing: Any = sys.is_finalizing, warn: Any = library.Pool.__del__) -> None:
        if not is_finalizing():  # at the program's end the names that it needs may be gone
            warn(self)

    def _setup_queues(self) -> None:
        self._inqueue = self._outqueue = self._quick_put = self._pipes
        self._quick_get = self._pipes.get

    def _get_sentinels(self) -> list[Any]:
        return [self._change_notifier._reader]  # type: ignore[attr-defined]  # the library wakes it by each result, too

    def apply(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Call a function in a worker and return what it returns."""
        with interrupting(self):  # an interrupt may come before the wait begins
            return super().apply(func, args, kwds)

    def map(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None
    ) -> list[Any]:
        """Call a function for each item, in the workers; return the results in order."""
        with interrupting(self):
            return super().map(func, iterable, chunksize)

    def starmap(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> list[Any]:
        """Call a function for each tuple of arguments, in the workers; return the results in order."""
        with interrupting(self):
            return super().starmap(func, iterable, chunksize)

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] = MappingProxyType({}),
        callback: Callable[[Any], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
    ) -> Any:
        """Call a function in a worker; return what its result is got from."""
        asked = super().apply_async(func, argument_tuple(args), dict(kwds), callback, error_callback)
        self._pipes.progress.expected += 1
        return asked

    def _map_async(
        self,
        func: Any,
        iterable: Any,
        mapper: Any,
        chunksize: int | None = None,
        *callbacks: Any,
        **named: Any,
    ) -> Any:
        # what numpy iterates over gives new arrays each time; other sequences may be read only once
        if not hasattr(iterable, "__len__") or type(iterable).__module__ == "numpy":
            iterable = list(iterable)
        if chunksize is None:  # the library divides by the workers that it has, which may be none just now
            chunksize = -(-len(iterable) // (self._processes * 4))  # type: ignore[attr-defined]
        if len(iterable) > chunksize > 0:
            mapper = _OneCall(mapper, ArgumentCache(iterable if type(iterable) in _LOOKED_AT else ()))
        asked = super()._map_async(func, iterable, mapper, chunksize, *callbacks, **named)  # type: ignore[misc]
        self._pipes.progress.expected += len(iterable)
        return asked

    def _guarded_task_generation(self, job: int, func: Any, iterable: Any) -> Iterator[Any]:
        call = func if isinstance(func, _OneCall) else _OneCall(func, None)
        try:
            for task in super()._guarded_task_generation(job, call.mapper, iterable):  # type: ignore[misc]
                self._pipes.copies = call.copies  # the thread that asks for tasks sends each
                yield task
        finally:
            self._pipes.copies = None

    @staticmethod
    def _help_stuff_finish(inqueue: Any, task_handler: Any, size: int) -> None:
        inqueue.stop()

    def _check_running(self) -> None:
        if self._state != library.RUN:
            raise ValueError(
                "Pool not running: it was closed or terminated, as the end of its `with` block does; make a "
                "new one"
            )

    @classmethod
    def _terminate_pool(
        cls,
        tasks: Any,
        inqueue: Any,
        outqueue: Any,
        pool: list[Any],
        notifier: Any,
        handler: Any,
        *others: Any,
    ) -> None:
        handler._state = library.TERMINATE  # it replaces no worker from now on
        notifier.put(None)
        if threading.current_thread() is not handler:
            handler.join()
        end_processes(pool, _GRACE_SECONDS)
        super()._terminate_pool(tasks, inqueue, outqueue, pool, notifier, handler, *others)  # type: ignore[misc]

    def terminate(self) -> None:
        """End the workers now; tasks under way raise `CancelledError`, where the library's wait forever.

        A worker that has not ended five seconds after its SIGTERM is killed.
        """
        super().terminate()
        end_jobs(self)

    def join(self) -> None:
        """Wait for the end of the workers, also if one dies with a lock that the others want."""
        with interrupting(self):
            self._join()

    def _join(self) -> None:
        if self._state == library.RUN:
            raise ValueError("Pool is still running: call close() or terminate() before join()")
        if self._state == library.CLOSE:
            _await_end(self._worker_handler)  # type: ignore[attr-defined]  # it replaced the dead until now
            running = list(self._pool)  # type: ignore[attr-defined]
            while running:
                if not self._result_handler.is_alive():  # type: ignore[attr-defined]
                    self._pipes.stop()  # a worker may wait for room for the results of tasks that are lost
                ready = wait([one.sentinel for one in running], _LOOK_SECONDS)
                for one in list(running):
                    # one that the user's program reaped has no exit code; a child of it may hold its pipe
                    if one.sentinel in ready or one.exitcode is not None:
                        one.join()  # settles what its end costs
                        running.remove(one)
        super().join()

    def reported_failure(self) -> str:
        """Return what the initializer of a worker has raised, if it could report that."""
        return ""

    def fail(self, error: WorkerDiedError) -> None:
        """Let all calls under way fail."""
        fail_jobs(list(self._cache.values()), error)  # type: ignore[attr-defined]


class TaskCall:
    """A job of a `CallPool`: one call.

    Parameters
    ----------
    done : callable
        Is called with whether it ended without an error, and with its result or error, in the pool's thread.
    name : callable, optional
        Returns what an error calls it.
    items : int
        How often the user's function is called.
    """

    def __init__(
        self,
        pool: CallPool,
        done: Callable[[bool, Any], object],
        name: Callable[[], str] | None = None,
        items: int = 1,
    ) -> None:
        self.pool: CallPool | None = pool
        self._cache, self._done, self.name = pool._cache, done, name or (lambda: "a call")  # type: ignore[attr-defined]
        self._job, self.items = next(library.job_counter), items  # type: ignore[attr-defined]
        self._cache[self._job] = self

    def _set(self, _index: int, outcome: tuple[bool, Any]) -> None:
        del self._cache[self._job]
        done, self._done, self.pool = self._done, _drop, None  # what asked may be what ends the pool
        reported(done, *outcome)


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
    """

    failed: WorkerDiedError | None = None

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
    ) -> None:
        self._owner, self._threads = owner, threads
        self._failure = sharedctypes.RawArray("c", _FAILURE_BYTES)
        if initializer is not None:
            initializer, initargs = _begin, (self._failure, initializer, *initargs)
        super().__init__(processes, initializer, initargs, max_tasks, context)
        parts = self._cache, self._pool, self._worker_handler, self._change_notifier  # type: ignore[attr-defined]
        self._end_idle = util.Finalize(self, _end_idle, parts, exitpriority=_BEFORE_TERMINATION)

    def end(self) -> None:
        """End the workers: by themselves if they have nothing to do, else now (idempotent)."""
        self._end_idle()
        self.terminate()

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        done: Callable[[bool, Any], object],
        *,
        copies: ArgumentCache | None = None,
        name: Callable[[], str] | None = None,
    ) -> None:
        """Call a function in a worker; of what several such calls hold, `copies` has the copies."""
        if self.failed is not None:
            raise copy.copy(self.failed)
        self._check_running()
        asked = TaskCall(self, done, name, items_of(function, args))
        task = asked._job, 0, function, args, kwargs
        waiting: Any = self._taskqueue  # type: ignore[attr-defined]
        try:
            if not waiting.empty() or not self._pipes.send_now(task):
                waiting.put((self._one_task(task, copies), None))
        except BaseException:  # an interrupt, or arguments that another thread changes
            self._cache.pop(asked._job, None)  # type: ignore[attr-defined]
            raise

    def count_ahead(self, ahead: Callable[[], int | None] | None) -> None:
        """Have `ahead` say how many items are to come that the pool has not got; None: all have come."""
        self._cache.ahead = ahead  # type: ignore[attr-defined]

    def is_own_thread(self) -> bool:
        """Return whether the thread that calls callbacks asks."""
        return threading.current_thread() is self._result_handler  # type: ignore[attr-defined]

    def _one_task(self, task: Any, copies: ArgumentCache | None) -> Iterator[Any]:
        self._pipes.copies = copies  # the thread that asks for the task sends it
        try:
            yield task
        finally:
            self._pipes.copies = None

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


def _drop(*_: object) -> None:
    pass


def _begin(failure: Any, initializer: Callable[..., object], *args: Any) -> None:
    try:
        initializer(*args)
    except BaseException as error:
        logging.getLogger("concurrent.futures").critical("Exception in initializer:", exc_info=True)
        failure.value = f"{class_name(error)}: {text_of(error)}".encode()[: _FAILURE_BYTES - 1]
        raise SystemExit(1) from None


def _await_end(thread: threading.Thread) -> None:
    def ended(seconds: float | None) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    wait_interruptibly(ended)


def _note_end(pipes: WorkerPipes, pool: weakref.ref[Pool], process: Any) -> None:
    pipes.note_end(process)
    pipes.act(partial(settle, pool, process))
