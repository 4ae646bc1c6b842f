"""Pools that survive their workers; everything else is the library's ``multiprocessing.pool``."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing import pool as library
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import Any, NamedTuple

from nbparallel.multiprocessing.messages.call_copies import CallCopies
from nbparallel.multiprocessing.starting.current_context import concrete_context
from nbparallel.multiprocessing.starting.process_state import argument_tuple, watch_end
from nbparallel.multiprocessing.starting.sliced_waits import SLICE_SECONDS, wait_in_slices
from nbparallel.multiprocessing.workers.dead_workers import Casualties
from nbparallel.multiprocessing.workers.pool_results import (
    INTERRUPTIBLE,
    end_jobs,
    interrupting,
    report_callbacks,
)
from nbparallel.multiprocessing.workers.pool_streams import ResultReader, TaskSender, renew_pipes
from nbparallel.multiprocessing.workers.task_interrupts import InterruptWord, TaskInterrupts, run_worker
from nbparallel.multiprocessing.workers.terminated_workers import TerminatedWorkers
from nbparallel.multiprocessing.workers.worker_slots import ResultWriter, TaskReader, make_slot

_LOOK_SECONDS = 0.05
"""Between two looks whether the result thread has ended before the workers; arbitrary."""
_LOOKED_AT = (list, tuple, range)
"""Of which a call looks for arrays that occur once: what iterating over others does is unknown."""


class _Cache(library._PoolCache):  # type: ignore[name-defined,misc]
    """Jobs under way; one that has failed as a whole may be taken out again."""

    def __setitem__(self, job: int, result: Any) -> None:
        result.__class__ = INTERRUPTIBLE.get(type(result), type(result))
        report_callbacks(result)
        super().__setitem__(job, result)

    def __delitem__(self, job: int) -> None:
        if job in self:
            super().__delitem__(job)


class _OneCall(NamedTuple):
    """In place of the function that works on a chunk, in the process that sends the chunks."""

    mapper: Any
    copies: CallCopies | None


class Pool(library.Pool):
    """A pool of processes, whose tasks and results travel our way.

    A worker that dies costs the task that it ran, which raises `WorkerDiedError`; one that waited costs
    nothing.  Only if it died in the middle of a message do all tasks under way fail.  The pool goes on.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: Any = None,
    ) -> None:
        self._casualties = Casualties()
        self._interrupt_word = word = InterruptWord()
        self_ = weakref.ref(self)  # what the library's threads hold must not keep the pool
        casualties = self._casualties

        def count() -> int:
            return 1 if (pool := self_()) is None else pool._processes  # type: ignore[attr-defined]

        def start_worker(ctx: Any, *, target: Any, args: Any) -> Any:
            slot = make_slot()
            tasks, results, *rest = args
            interrupts = TaskInterrupts(word)
            ends = TaskReader(tasks, slot, interrupts), ResultWriter(results, slot)
            process = ctx.Process(target=run_worker, args=(interrupts, count(), target, *ends, *rest))
            process.interrupts_late = True
            casualties.slots[id(process)] = slot
            watch_end(process, lambda ended: _settle(self_, ended))
            return process

        self.Process = start_worker  # type: ignore[method-assign]
        super().__init__(processes, initializer, initargs, maxtasksperchild, context or concrete_context())
        self._cache.__class__ = _Cache  # type: ignore[attr-defined]

    def _setup_queues(self) -> None:
        self._inqueue = self._ctx.SimpleQueue()  # type: ignore[attr-defined]
        self._outqueue = self._ctx.SimpleQueue()  # type: ignore[attr-defined]
        self._quick_put = TaskSender(self._inqueue._writer)
        self._quick_get = ResultReader(self._outqueue._reader)
        self._outqueue.put = self._quick_get.put_end
        self._inqueue.stop = partial(_stop, self._quick_put, self._quick_get)

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
        return super().apply_async(func, argument_tuple(args), dict(kwds), callback, error_callback)

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
            mapper = _OneCall(mapper, CallCopies(iterable if type(iterable) in _LOOKED_AT else ()))
        return super()._map_async(func, iterable, mapper, chunksize, *callbacks, **named)  # type: ignore[misc]

    def _guarded_task_generation(self, job: int, func: Any, iterable: Any) -> Iterator[Any]:
        call = func if isinstance(func, _OneCall) else _OneCall(func, None)
        try:
            for task in super()._guarded_task_generation(job, call.mapper, iterable):  # type: ignore[misc]
                self._quick_put.copies = call.copies  # the thread that asks for tasks sends each
                yield task
        finally:
            self._quick_put.copies = None

    @staticmethod
    def _help_stuff_finish(inqueue: Any, task_handler: Any, size: int) -> None:
        inqueue.stop()  # the library makes room, for which it needs a lock that a dead worker may have

    def _check_running(self) -> None:
        if self._state != library.RUN:  # type: ignore[attr-defined]
            raise ValueError(
                "Pool not running: it was closed or terminated, as the end of its `with` block does; make a "
                "new one"
            )

    @classmethod
    def _terminate_pool(cls, tasks: Any, inqueue: Any, outqueue: Any, pool: list[Any], *others: Any) -> None:
        super()._terminate_pool(tasks, inqueue, outqueue, TerminatedWorkers(pool), *others)  # type: ignore[misc]

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
        if self._state == library.RUN:  # type: ignore[attr-defined]
            raise ValueError("Pool is still running: call close() or terminate() before join()")
        if self._state == library.CLOSE:  # type: ignore[attr-defined]
            _await_end(self._worker_handler)  # type: ignore[attr-defined]  # it replaced the dead until now
            results = self._outqueue._reader
            while running := [worker.sentinel for worker in self._pool if not _has_ended(worker)]:  # type: ignore[attr-defined]
                if self._result_handler.is_alive():  # type: ignore[attr-defined]
                    wait(running, _LOOK_SECONDS)
                elif results in wait([*running, results], SLICE_SECONDS):
                    # a worker waits for room for the results of tasks that are lost
                    os.read(results.fileno(), 1 << 20)
            self._quick_put.stop()  # no process would take it
        super().join()

    def _renew_streams(self) -> None:
        renew_pipes((self._inqueue, self._quick_put), (self._outqueue, self._quick_get))


def _await_end(thread: threading.Thread) -> None:
    def ended(seconds: float | None) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    wait_in_slices(ended)


def _stop(*streams: TaskSender | ResultReader) -> None:
    for stream in streams:
        stream.stop()


def _has_ended(worker: Any) -> bool:
    if worker.exitcode is None:
        return False
    worker.join()  # settles what it costs
    return True


def _settle(pool: weakref.ref[Pool], process: Any) -> None:
    living = pool()
    if living is not None and living._state != library.TERMINATE:  # type: ignore[attr-defined]
        living._casualties.settle(living, process)


def __getattr__(name: str) -> Any:
    return getattr(library, name)
