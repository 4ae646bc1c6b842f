"""Executor: the library's ``concurrent.futures.ProcessPoolExecutor``, whose calls travel our way."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import process as library
from functools import partial
from multiprocessing import sharedctypes
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, cast

from nbparallel.errors import StartError, WorkerDiedError
from nbparallel.multiprocessing.connection import adopt_pipe
from nbparallel.multiprocessing.messages.call_copies import CallCopies
from nbparallel.multiprocessing.messages.light_pickling import RAISED, reduce_raised
from nbparallel.multiprocessing.messages.parcels import pickle_message, why_unsendable
from nbparallel.multiprocessing.queues import Queue, SimpleQueue
from nbparallel.multiprocessing.starting.current_context import default_context
from nbparallel.multiprocessing.starting.late_interrupts import late_interrupts
from nbparallel.multiprocessing.starting.process_state import BEFORE_CHILDREN
from nbparallel.multiprocessing.starting.sliced_waits import wait_in_slices
from nbparallel.multiprocessing.workers.dead_workers import describe_end, signal_name
from nbparallel.multiprocessing.workers.task_interrupts import InterruptWord, TaskInterrupts, prepare_worker
from nbparallel.wire.system import affine_cpus

_FAILURE_BYTES = 512
"""Of what an initializer raised, as text."""
_END_SECONDS = 5.0
"""How long a process, whose pipe has ended, may take until its exit code is there."""


RAISED[library._ExceptionWithTraceback] = reduce_raised
# a forked child has none of these threads, but may be one of them: a callback of theirs can start workers
os.register_at_fork(after_in_child=library._threads_wakeups.clear)


class BrokenPoolError(WorkerDiedError, library.BrokenProcessPool):
    """A worker of an executor ended: all its calls under way fail, and it takes no more.

    Attributes
    ----------
    pid, exit_code, signal_name, task
        As `WorkerDiedError` has them.
    """


_worker: list[TaskInterrupts] = []
"""In a worker: what stops its calls."""


_OF_THREAD = ("_processes", "_call_queue", "_result_queue")
"""Attributes of an executor that its thread has, too."""


def _initialize(
    interrupts: TaskInterrupts,
    workers: int,
    threads: int | None,
    failure: Any,
    initializer: Callable[..., object] | None,
    *args: Any,
) -> None:
    prepare_worker(interrupts, workers, threads)
    _worker.append(interrupts)
    if initializer is not None:
        try:
            initializer(*args)
        except BaseException as error:
            failure.value = traceback.format_exception_only(error)[-1].strip().encode()[: len(failure) - 1]
            raise


class InterruptibleFuture(Future):  # type: ignore[type-arg]
    """A call's result; an interrupt of a wait for it stops all calls of its executor."""

    _executor: weakref.ref[Executor]

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
            ended = wait_in_slices(self._done_within, timeout)
        except KeyboardInterrupt:
            executor = self._executor()
            if executor is not None:
                executor._interrupt()
            raise
        return wait(None if ended else 0)

    def _done_within(self, seconds: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(self.done, seconds)


class CallQueue(Queue, library._SafeQueue):
    """The library's queue of calls, as a queue of ours; made of one by `adopt`."""

    @classmethod
    def adopt(cls, queue: Any) -> None:
        """Make a queue of the library's that no process has yet one of ours."""
        queue.__class__ = cls
        queue._reader, queue._writer = adopt_pipe(queue._reader, queue._writer)
        queue._reset()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next call; only workers ask."""
        call = super().get(block, timeout)
        if call is not None and _worker:
            call.fn = _worker[0].guard(call.work_id, call.fn)
        return call

    def _on_queue_feeder_error(self, e: Exception, obj: Any) -> None:
        if isinstance(obj, library._CallItem):
            from nbparallel.multiprocessing.messages.task_errors import name_part

            call: Any = obj
            e = name_part(e, call.fn, call.args, call.kwargs)
        super()._on_queue_feeder_error(e, obj)

    @classmethod
    def _message(cls, obj: Any, mailbox: int) -> memoryview:
        found = obj.fn.args[0] if isinstance(obj, library._CallItem) and isinstance(obj.fn, partial) else None
        if not isinstance(found, _MappedFunction):
            return pickle_message(obj, mailbox, task=True)[0]
        obj.fn = partial(obj.fn.func, found.function)
        return pickle_message(obj, mailbox, found.copies, task=True)[0]


class ResultQueue(SimpleQueue):
    """The library's queue of results, as a queue of ours."""

    def put(self, obj: Any) -> None:
        """Send a result, or raise what names the result that cannot be sent."""
        try:
            super().put(obj)
        except Exception as error:  # noqa: BLE001  whatever the object's own code raises
            found = why_unsendable(getattr(obj, "result", None), "the result of a task")
            raise found or error from None


class _MappedFunction(NamedTuple):
    """In place of a function that `Executor.map` calls, until a call is sent."""

    function: Callable[..., Any]
    copies: CallCopies


def _shut_down(executor: weakref.ref[Executor]) -> None:
    if (living := executor()) is not None:
        living.shutdown()


def _call(function: Callable[[], Any]) -> Any:
    return function()


class ManagerThread(library._ExecutorManagerThread):
    """The library's thread that hands out calls; it says which worker ended, and how."""

    kept: Executor | None = None
    """Its executor while calls are under way, if workers are replaced: only one that lives does so."""

    def process_result_item(self, result_item: Any) -> None:
        """Hand out a result."""
        super().process_result_item(result_item)
        if not self.pending_work_items:
            self.kept = None

    def terminate_broken(self, cause: Any, bpe_message: Any = None) -> None:
        """Let all calls fail."""
        if cause is bpe_message is None and (error := self._died()) is not None:
            executor = self.executor_reference()
            if executor is not None:
                executor._died = error
            del executor
            with self.shutdown_lock:
                for item in self.pending_work_items.values():
                    with contextlib.suppress(InvalidStateError):  # it was cancelled
                        # its own: one would collect the frames of all waits
                        item.future.set_exception(copy.copy(error))
                self.pending_work_items.clear()
        super().terminate_broken(cause, *(() if bpe_message is None else (bpe_message,)))

    def _replace_dead_worker(self) -> Any:
        with late_interrupts():  # since 3.14 the library starts the worker past `_spawn_process`
            return super()._replace_dead_worker()  # type: ignore[misc]

    def _died(self) -> BrokenPoolError | None:
        processes: dict[Any, Any] = {process.sentinel: process for process in self.processes.values()}
        dead = [processes[sentinel] for sentinel in wait(list(processes), 0)]
        for process in dead:
            process.join(_END_SECONDS)
        # those that end by themselves after a failed initializer end later, and with 0
        dead.sort(key=lambda process: process.exitcode == 0)
        if not dead:
            return None
        first, count = dead[0], len(self.pending_work_items)
        name, code = signal_name(first.exitcode), first.exitcode
        task = f"{count} calls" if count != 1 else "1 call"
        end = describe_end(first)
        if (executor := self.executor_reference()) is not None and (raised := executor._start_failure.value):
            end = f"has ended: its initializer raised {raised.decode(errors='replace')}"
        del executor
        return BrokenPoolError(
            f"worker {first.pid} of the executor {end}; {task} that it had not finished yet, "
            "or that waited, fail with this error, and the executor takes no more: make a new one",
            pid=first.pid or 0,
            exit_code=code if name is None else None,
            signal_name=name,
            task=task,
        )


class Executor(library.ProcessPoolExecutor):
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
    exception, with the worker's traceback as cause.  When a worker dies, all calls that were not finished
    raise an error that is a `WorkerDiedError` and a ``BrokenProcessPool``; `Pool` survives that.
    """

    _died: BrokenPoolError | None = None

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
        self._interrupt_word = InterruptWord()
        self._start_failure = sharedctypes.RawArray("c", _FAILURE_BYTES)
        interrupts, failure = TaskInterrupts(self._interrupt_word), self._start_failure
        initargs = interrupts, max_workers or affine_cpus(), threads, failure, initializer, *initargs
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")  # as the library
        super().__init__(max_workers, context, _initialize, initargs, max_tasks_per_child=max_tasks_per_child)
        CallQueue.adopt(vars(self)["_call_queue"])
        vars(self)["_result_queue"].__class__ = ResultQueue

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a worker; return immediately.

        Raises
        ------
        WorkerDiedError
            A worker has died: make a new executor.
        RuntimeError
            The executor was shut down.
        """
        try:
            future = super().submit(fn, *args, **kwargs)
            future.__class__ = InterruptibleFuture
            cast("InterruptibleFuture", future)._executor = weakref.ref(self)
            if vars(self)["_max_tasks_per_child"] is not None:
                self._keep_while_calls_are_under_way()
            return future
        except library.BrokenProcessPool as error:
            if self._died is None:
                raise
            raise copy.copy(self._died) from error
        except (StartError, OSError):  # no worker could be started
            for item in list(vars(self)["_pending_work_items"].values())[-1:]:
                item.future.cancel()
            raise

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **options: Any) -> Iterator[Any]:
        """Call a function with an element of each iterable; return an iterator over the results, in order.

        Parameters
        ----------
        timeout, chunksize, buffersize
            As in the library.

        Notes
        -----
        A private array in several calls is copied once, unless `buffersize` is given.
        """
        if options.get("buffersize") is None:
            calls = list(zip(*iterables, strict=False))
            fn = cast("Callable[..., Any]", _MappedFunction(fn, CallCopies(calls)))
            iterables = tuple(zip(*calls, strict=True)) or ((),)
        return super().map(fn, *iterables, **options)

    def _submit_copied(self, function: Callable[[], Any], copies: CallCopies | None) -> Future[Any]:
        """Call a function; of what several such calls hold, `copies` has the copies."""
        if copies is None:
            return self.submit(function)
        carrier = cast("Callable[..., Any]", _MappedFunction(function, copies))
        return self.submit(partial(_call, carrier))

    def _keep_while_calls_are_under_way(self) -> None:
        thread = vars(self)["_executor_manager_thread"]
        thread.kept = self
        if not vars(self)["_pending_work_items"]:  # the thread may have looked before
            thread.kept = None

    def _adjust_process_count(self) -> None:
        own: dict[str, Any] = vars(self)
        processes = self._of_thread()["processes"]
        if own["_max_tasks_per_child"] is None:
            super()._adjust_process_count()
        elif len(processes) < own["_max_workers"]:
            # the library counts a worker that has ended among the idle ones, starts none in its place, and
            # calls wait without end: https://github.com/python/cpython/issues/115634
            self._spawn_process()

    def _of_thread(self) -> dict[str, Any]:
        """Return where the processes and queues are: its own thread has what `shutdown` has taken from it."""
        thread = threading.current_thread()  # another executor's in a call that one of its results brought
        if isinstance(thread, ManagerThread) and thread.executor_reference() is self:
            return vars(thread)
        return {name[1:]: vars(self)[name] for name in _OF_THREAD}

    def _spawn_process(self) -> None:
        own: dict[str, Any] = vars(self)
        owner = self._of_thread()
        given = own["_initializer"], own["_initargs"], own["_max_tasks_per_child"]
        queues = owner["call_queue"], owner["result_queue"]
        with late_interrupts():
            process = own["_mp_context"].Process(target=library._process_worker, args=(*queues, *given))
            process.start()
        owner["processes"][process.pid] = process

    def _interrupt(self) -> None:
        """Stop all calls under way: a wait for one was interrupted."""
        own: dict[str, Any] = vars(self)
        number = own["_queue_count"]
        for item in list(own["_pending_work_items"].values()):
            item.future.cancel()
        self._interrupt_word.interrupt(number, list((own["_processes"] or {}).values()))

    def _start_executor_manager_thread(self) -> None:
        own: dict[str, Any] = vars(self)
        if own["_executor_manager_thread"] is not None:
            return
        # as the library's, but for the class
        if not own["_safe_to_dynamically_spawn_children"]:
            self._launch_processes()  # type: ignore[attr-defined]
        # a process of another library waits for its children before its threads end, one of which ends them
        Finalize(self, _shut_down, (weakref.ref(self),), exitpriority=BEFORE_CHILDREN)
        own["_executor_manager_thread"] = thread = ManagerThread(self)
        thread.start()
        library._threads_wakeups[thread] = own["_executor_manager_thread_wakeup"]
