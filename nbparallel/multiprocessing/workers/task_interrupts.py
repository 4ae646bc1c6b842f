"""Interrupts of tasks: a wait in the pool's process is interrupted, and what its workers run stops.

::

    pool's process   a wait for a result raises KeyboardInterrupt    `worker_pool`
                       InterruptWord.interrupt                       every task before this number is to stop
                         SIGINT to each worker, and once more         `REPEAT_AFTER`
    worker           TaskInterrupts._on_signal                       such a task runs: KeyboardInterrupt
                     TaskInterrupts.guard                            its result is a CancelledError

A front end signals the whole process group, a program perhaps one process: hence the number in shared
memory, without which a worker ignores the signal.  So none hits a later task, and a worker that waits stays
silent; to one that starts the signal is blocked.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from multiprocessing import sharedctypes
from typing import Any

from nbparallel.errors import RemoteError
from nbparallel.errors.questions import ask, class_name, text_of, traceback_of
from nbparallel.multiprocessing.starting.process_state import begin_interrupts, defers_sigint

INTERRUPTED = "the wait for this pool or executor was interrupted before the task had ended"
"""What other tasks raise that were under way."""
REPEAT_AFTER = 0.5
"""Seconds until the signal is sent again: Python runs its handler between two instructions, and so one that
comes just before a task's system call is seen when the call ends (an executor's end would wait for it)."""


class InterruptWord:
    """A number in memory that the workers share: tasks with a smaller one are to stop."""

    def __init__(self) -> None:
        self._word = sharedctypes.RawValue("q", -1)

    def covers(self, task: int) -> bool:
        """Return whether a task is to stop."""
        stop: int = self._word.value
        return 0 <= task < stop

    def interrupt(self, number: int, workers: Iterable[Any]) -> None:
        """Stop the tasks with smaller numbers; `workers` are the processes that may run one."""
        self._word.value = number
        running = [worker for worker in workers if worker.pid is not None and worker.exitcode is None]
        if not running:
            return
        _signal(running)
        again = threading.Timer(REPEAT_AFTER, _signal, [running])
        again.daemon = True
        with contextlib.suppress(RuntimeError):  # no further thread can be started
            again.start()


def _signal(workers: list[Any]) -> None:
    for worker in workers:
        # Not `exitcode`, which would reap a process that another thread waits for.
        if (popen := worker._popen) is not None and popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(popen.pid, signal.SIGINT)


class TaskInterrupts:
    """The worker's side: decides whether a SIGINT is for the task that runs."""

    def __init__(self, word: InterruptWord) -> None:
        self._word = word
        self._tasks: list[int] = []
        """The number of the task that runs; empty: none."""
        self.raised = False
        """Whether the task that runs, or ran last, was interrupted."""
        self.disarm: Callable[[], None] = self._tasks.clear
        """From now on no interrupt raises.  No code of Python runs in it, and so no signal's handler."""

    def install(self) -> None:
        """Take over SIGINT; an initializer, which comes later, may put its own handler there."""
        signal.signal(signal.SIGINT, self._on_signal)
        begin_interrupts()

    def arm(self, task: int) -> None:
        """From now on interrupts of `task` raise."""
        self.raised = False
        self._tasks[:] = [task]

    def _on_signal(self, _number: int, _frame: object) -> None:
        if self._tasks and not self.raised and self._word.covers(self._tasks[0]):
            self.raised = True
            raise KeyboardInterrupt

    def guard(self, task: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `function` as a task that an interrupt stops: it raises `CancelledError` then."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                self.arm(task)
                if self._word.covers(task):
                    raise CancelledError(INTERRUPTED)
                return function(*args, **kwargs)
            except BaseException as error:
                if self.raised and isinstance(error, KeyboardInterrupt):
                    raise CancelledError(INTERRUPTED) from None
                if (shown := describable(error)) is error:
                    raise
            finally:
                self.disarm()
            raise shown  # here: the error would be its context, and be asked when that is shown

        return call


def describable(error: BaseException) -> BaseException:
    """Return `error`; one with its class's name, text and frames where its own code raises when shown."""

    def shown() -> BaseException:
        traceback.format_exception(error)
        return error

    def plain() -> BaseException:
        name, text = class_name(error), text_of(error)
        frames = "".join(traceback.format_tb(traceback_of(error)))
        return RemoteError(f"{name}: {text}\n\n{frames}", ename=name, evalue=text)

    return ask(shown, plain)


worker_place: list[int] = []
"""That of the pool's worker that this process is: 0 … number of workers - 1.

One that takes over has the place of the one that ended.
"""


@defers_sigint
def run_worker(
    interrupts: TaskInterrupts,
    place: int,
    workers: int,
    threads: int | None,
    target: Callable[..., Any],
    *args: Any,
) -> None:
    """Run a worker: only interrupts of its tasks reach it, and it has its share of the CPUs.

    `threads` are those of its numeric libraries; None: its share of the CPUs.
    """
    from nbparallel.wire.system import IMPORT_HOOKS, affine_cpus, usable_cpus

    worker_place[:] = [place]
    interrupts.install()
    for hook in IMPORT_HOOKS:
        hook.install()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in blocks, lines of several workers would mix
            stream.reconfigure(line_buffering=True, write_through=False)
    if threads is not None or workers > 1:
        from nbparallel.multiprocessing.starting.worker_threads import limit_threads

        share = max(1, usable_cpus(affine_cpus()) // workers)
        limit_threads(share if threads is None else threads, insist=threads is not None)
    target(*args)
