"""Pools that survive their workers."""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from multiprocessing import pool as library, sharedctypes
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import Any, NamedTuple

from nbparallel.errors import WorkerDiedError
from nbparallel.multiprocessing.connection import Pipe
from nbparallel.multiprocessing.messages.parcels import ArgumentCache
from nbparallel.multiprocessing.starting.process_state import (
    argument_tuple,
    concrete_context,
    wait_interruptibly,
    watch_end,
)
from nbparallel.multiprocessing.workers.task_interrupts import (
    INTERRUPTED,
    InterruptWord,
    TaskInterrupts,
    run_worker,
)
from nbparallel.multiprocessing.workers.worker_pipes import ItemProgress, WorkerPipe, WorkerPipes
from nbparallel.wire.system import signal_of

# What the death of a worker costs: nothing, or the task that it had.

_FAILED_STARTS = 8
"""Workers that may die one after the other before any has begun."""
_LOST = 255
"""Exit code that the library gives a process whose fork server has ended."""


def describe_end(process: Any) -> str:
    """Return how a worker ended, as the end of a sentence."""
    code = process.exitcode
    if name := signal_of(code):
        cause = ": by hand, or by the system because memory ran out" if name == "SIGKILL" else ""
        return f"was ended by {name}{cause}"
    printed = {1: "an exception, which it has printed, ", _LOST: "the end of its fork server, "}.get(code, "")
    return f"ended itself with exit code {code} ({printed}sys.exit, os._exit, or C code that calls exit)"


def end_processes(processes: Sequence[Any], seconds: float) -> None:
    """End processes: SIGTERM, after some seconds SIGKILL.

    A handler that was inherited may ignore the first, or raise where Python drops exceptions.
    """
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def died_error(process: Any, task: str, owner: str = "pool", why: str = "") -> WorkerDiedError:
    """Return the error about a worker and what it lost; `why` is what it ended of, if it has said so."""
    code, name = process.exitcode, signal_of(process.exitcode)
    return WorkerDiedError(
        f"worker {process.pid} of the {owner} {why or describe_end(process)}; {task}",
        pid=process.pid,
        exit_code=code if name is None else None,
        signal_name=name,
        task=task,
    )


def settle(living: weakref.ref[Any], process: Any) -> None:
    """Act on the end of a pool's worker, in the thread that reads results: its task fails."""
    pool = living()  # what waits to be done must not keep the pool
    if pool is None or pool._state == library.TERMINATE:
        return
    task, was_ready = pool._pipes.leave_out(process)
    if task is not None:
        pool._pipes.add_result(
            task, (False, died_error(process, f"it ran {_task_name(pool, *task)}", pool._owner))
        )
    if process.exitcode == 0 and task is None:
        return
    pool._failed_starts = 0 if was_ready else pool._failed_starts + 1
    told = pool.reported_failure()
    if not told and pool._failed_starts < _FAILED_STARTS:
        return
    pool._failed_starts = 0
    text = f"{_FAILED_STARTS} workers ended before their first task: look at the initializer"
    why = f"has ended: its initializer raised {told}" if told else ""
    pool.fail(died_error(process, "it takes no calls: make a new one" if told else text, pool._owner, why))


_CALLS = (
    (library.MapResult, "a call of map"),
    (library.ApplyResult, "a call of apply"),
    (library.IMapIterator, "a call of imap"),
)
"""In the order in which they are looked at: one is a subclass of the next."""


def _task_name(pool: Any, job: int, index: int) -> str:
    result = pool._cache.get(job)
    if name := getattr(result, "name", None):
        return str(name())
    chunk = getattr(result, "_chunksize", 1)
    if chunk > 1:
        return f"a chunk of {chunk} tasks, from task {index * chunk} of a call of map"
    name = next((name for kind, name in _CALLS if isinstance(result, kind)), f"job {job}")
    return f"task {index} of {name}"


def fail_jobs(jobs: list[Any], error: BaseException) -> None:
    """Let these jobs fail, in the thread that reads results or after its end."""
    for result in jobs:
        if result._job not in result._cache:
            continue
        error = copy.copy(error)  # one would collect the frames of all waits
        if hasattr(result, "_unsorted"):
            result.end(error)
            continue
        if hasattr(result, "_number_left"):
            result._number_left = 1
        result._set(0, (False, error))


# Results, whose waits can be interrupted.


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


def _wait(results: Any, wait: Callable[[float | None], object], timeout: float | None) -> None:
    pool = results._pool  # none is left when the job has ended
    try:  # no context manager: it costs 2 us a result
        wait_interruptibly(wait, timeout)
    except KeyboardInterrupt:
        if pool is not None:
            pool.interrupt()
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
_IDLE_SECONDS = 5.0
"""For workers that do nothing to end by themselves."""
_GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL, as a rank has after an interrupt."""
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
        self.pipes.copies.pop(job, None)
        if not self.keys():
            self.pipes.progress.ended_ns = time.monotonic_ns()
        if not self.keys() and self.handler._state != library.RUN:
            self.notifier.put(None)


class _OneCall(NamedTuple):
    """In place of the function that works on a chunk, until the call's tasks are made."""

    mapper: Any
    copies: ArgumentCache


class Pool(library.Pool):
    """A pool of processes, whose tasks and results travel our way.

    A worker that dies costs the task that it had, which raises `WorkerDiedError`; one that waited costs
    nothing.  The pool goes on.
    """

    _threads: int | None = None
    """Of each worker's numeric libraries; None: its share of the CPUs."""
    _owner = "pool"
    """In whose name it speaks of its workers."""
    _says_why = False
    """Whether a result that cannot be sent is what `why_unsendable` says, not a ``MaybeEncodingError``."""
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
        says_why = self._says_why

        def start_worker(ctx: Any, *, target: Any, args: Any) -> Any:
            _, _, *rest = args
            interrupts, place = TaskInterrupts(word), pipes.free_place()
            pools_end, workers_end = Pipe()
            siblings = [*pipes.ends(), pools_end] if ctx.get_start_method() == "fork" else ()
            begun = sharedctypes.RawValue("q", 0)
            pipe = WorkerPipe(workers_end, begun, interrupts, siblings, says_why=says_why)
            process = ctx.Process(
                target=run_worker, args=(interrupts, place, count, threads, target, pipe, pipe, *rest)
            )
            pipes.add(process, pools_end, begun, place)
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
        if isinstance(func, _OneCall):
            func, self._pipes.copies[job] = func
        tasks: Iterator[Any] = super()._guarded_task_generation(job, func, iterable)  # type: ignore[misc]
        return tasks

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

    def interrupt(self, *, running: bool = True) -> None:
        """Stop all tasks that are under way, or those that have not begun: no one waits for them."""
        jobs, number = list(self._cache.values()), next(library.job_counter)  # type: ignore[attr-defined]
        self._pipes.drop_jobs(job._job for job in jobs)
        self._interrupt_word.interrupt(number, list(self._pool) if running else ())  # type: ignore[attr-defined]
        self._pipes.act(partial(fail_jobs, jobs, CancelledError(INTERRUPTED)))

    def terminate(self) -> None:
        """End the workers now; tasks under way raise `CancelledError`, where the library's wait forever.

        A worker that has not ended five seconds after its SIGTERM is killed.
        """
        super().terminate()
        end_jobs(self)

    def join(self) -> None:
        """Wait for the end of the workers, also if one dies with a lock that the others want."""
        try:
            self._join()
        except KeyboardInterrupt:
            self.interrupt()
            raise

    def _join(self) -> None:
        if self._state == library.RUN:
            raise ValueError("Pool is still running: call close() or terminate() before join()")
        if self._state == library.CLOSE:
            handler: threading.Thread = self._worker_handler  # type: ignore[attr-defined]

            def has_ended(seconds: float | None) -> bool:
                handler.join(seconds)
                return not handler.is_alive()

            wait_interruptibly(has_ended)  # it replaced the dead until now
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


def _note_end(pipes: WorkerPipes, pool: weakref.ref[Pool], process: Any) -> None:
    pipes.note_end(process)
    pipes.act(partial(settle, pool, process))
