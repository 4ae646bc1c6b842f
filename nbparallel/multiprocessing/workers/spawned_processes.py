"""Processes that succeed or fail together, as those of ``torch.multiprocessing.spawn``."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

from nbparallel.errors import NbParallelError, PeerFailedError, RankDiedError
from nbparallel.errors.questions import class_name, traceback_of
from nbparallel.multiprocessing.starting.process_state import (
    SLICE_SECONDS,
    argument_tuple,
    begin_interrupts,
    default_context,
    defers_sigint,
)
from nbparallel.multiprocessing.workers.task_interrupts import describable
from nbparallel.multiprocessing.workers.worker_pool import end_processes
from nbparallel.wire.system import signal_of

__tracebackhide__ = True  # of pytest: an error of a process shows the test, not the way here

_OF_PEERS = PeerFailedError.__name__, RankDiedError.__name__
"""What a rank raises because another one has failed."""
GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL, as in torch."""


class ProcessException(NbParallelError, RuntimeError):  # noqa: N818  torch's name
    """A process of `spawn` failed.

    Attributes
    ----------
    msg : str
        The message.
    error_index : int
        Which process it was: the first argument of its function.
    error_pid : int
        Its process id.
    """

    msg: str
    error_index: int
    error_pid: int

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg, self.error_index, self.error_pid = msg, error_index, error_pid

    def __reduce__(self) -> Any:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """Its function raised an exception, which is the cause of this one if it could be sent."""


class ProcessExitedException(ProcessException):
    """It ended by a signal, or by an exit code other than 0.

    Attributes
    ----------
    exit_code : int
        Negative: the number of the signal.
    signal_name : str or None
        ``"SIGKILL"`` and so on.
    """

    exit_code: int
    signal_name: str | None

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code, self.signal_name = exit_code, signal_name

    def __reduce__(self) -> Any:
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)


@defers_sigint
def _run(function: Callable[..., Any], index: int, args: tuple[Any, ...], report: Any) -> None:
    """Call a function in its process, and report what it raises."""
    try:
        begin_interrupts()
        function(index, *args)
    except KeyboardInterrupt:
        pass  # it was interrupted together with its parent, which says so
    except Exception as error:  # noqa: BLE001  whatever the user's code raises
        skipped = error.__traceback__.tb_next if error.__traceback__ else None  # the frame of this function
        shown = describable(error.with_traceback(skipped))
        carried = ExceptionWithTraceback(shown, traceback_of(shown))
        with contextlib.suppress(OSError):  # no process reads it any more
            report.send((class_name(error), "".join(traceback.format_exception(shown)), carried))
        sys.exit(1)
    finally:
        report.close()


class ProcessContext:
    """Processes that were started together by `start_processes` with ``join=False``.

    Attributes
    ----------
    processes : list of Process
        In the order of their indices.
    sentinels : dict
        Of those that have not been joined -> index.
    """

    processes: list[Any]
    sentinels: dict[Any, int]

    def __init__(self, processes: Sequence[Any], reports: Sequence[Any]) -> None:
        self.processes = list(processes)
        self._reports = dict(enumerate(reports))
        self._failures: dict[int, tuple[str, str, BaseException]] = {}
        """Of those that have raised: name of the class, text, and the exception."""
        self.sentinels = {process.sentinel: index for index, process in enumerate(self.processes)}

    def pids(self) -> list[int]:
        """Return the process ids."""
        return [int(process.pid) for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a process has ended, or until one has failed; then end the others.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.
        grace_period : float, optional
            Seconds that the others have to end by themselves when one has failed, and once more between
            SIGTERM and SIGKILL.  By default none, and 30 s.

        Returns
        -------
        bool
            Whether all have ended, each with exit code 0.  False: call it again.

        Raises
        ------
        ProcessRaisedException
            A function raised; its exception is the cause.
        ProcessExitedException
            A process ended by a signal or an exit code.

        Notes
        -----
        As ``torch.multiprocessing.ProcessContext.join``.
        """
        if not self.sentinels:
            return True
        failed = None
        for sentinel in self._ended(timeout):
            index = self.sentinels.pop(sentinel)
            process = self.processes[index]
            process.join()
            if process.exitcode != 0:
                failed = index
                break
            self._close(index)
        if failed is None:
            return not self.sentinels
        self._read()
        failed = self._first_failed(failed)
        self.end(grace_period)
        raise self._error(failed)

    def end(self, grace_period: float | None = None) -> None:
        """End all processes: SIGTERM, after a while SIGKILL (idempotent)."""
        if grace_period is not None:
            self._await_all(grace_period)
        end_processes(self.processes, GRACE_SECONDS if grace_period is None else grace_period)
        self.sentinels.clear()
        for index in range(len(self.processes)):
            self._close(index)

    def _ended(self, timeout: float | None) -> list[Any]:
        """Return the sentinels of processes that have ended; none if `timeout` seconds have passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            ready = connection.wait([*self.sentinels, *self._reports.values()], min(left, SLICE_SECONDS))
            self._read()  # one that writes a long report goes on
            ended = [sentinel for sentinel in self.sentinels if sentinel in ready]
            if ended or not left:
                return ended

    def _await_all(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))

    def _read(self) -> None:
        for index, end in list(self._reports.items()):
            if end.poll():
                with contextlib.suppress(EOFError, OSError):  # it has ended without a word
                    self._failures[index] = end.recv()
                self._close(index)

    def _close(self, index: int) -> None:
        if index in self._reports:
            self._reports.pop(index).close()

    def _first_failed(self, index: int) -> int:
        """Return the process that failed first; `index` may have because another rank did."""
        if not self._failed_as_peer(index):
            return index
        for other, process in enumerate(self.processes):
            has_failed = other in self._failures or process.exitcode not in (None, 0)
            if has_failed and not self._failed_as_peer(other):
                return other
        return index

    def _failed_as_peer(self, index: int) -> bool:
        failure = self._failures.get(index)
        return failure is not None and failure[0] in _OF_PEERS

    def _error(self, index: int) -> ProcessException:
        process = self.processes[index]
        failure = self._failures.get(index)
        if failure is not None:
            text = f"\n\n-- Process {index} terminated with the following error:\n{failure[1]}"
            error = ProcessRaisedException(text, index, process.pid)
            error.__cause__ = failure[2]
            return error
        name = signal_of(process.exitcode)
        how = f"with signal {name}" if name else f"with exit code {process.exitcode}"
        return ProcessExitedException(
            f"process {index} terminated {how}", index, process.pid, process.exitcode, name
        )


def start_processes(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Call ``fn(index, *args)`` in `nprocs` processes; if one fails, the others are ended.

    Parameters
    ----------
    fn : callable
        One that is defined in ``__main__`` or in a cell travels by value: nothing is imported again.
    args : sequence
        Shared arrays arrive as the same memory.
    nprocs : int
        How many processes.
    join : bool
        Whether to wait until all have ended.
    daemon : bool
        As for `Process`.  In either case they end with this process, however that ends.
    start_method : {"spawn", "fork", "forkserver"}
        How processes are started.

    Returns
    -------
    ProcessContext or None
        None if `join` is true.  What the functions return is dropped.

    Raises
    ------
    ProcessRaisedException, ProcessExitedException
        As `ProcessContext.join` raises them.
    KeyboardInterrupt
        It was interrupted, and has ended the processes.
    UnpicklableError
        An argument cannot be sent; no process is left.

    Notes
    -----
    As ``torch.multiprocessing.start_processes``; torch is not needed.
    """
    ctx, args = default_context().get_context(start_method), argument_tuple(args)
    processes: list[Any] = []
    reports: list[Any] = []
    try:
        for index in range(nprocs):
            reading, writing = ctx.Pipe(duplex=False)
            reports.append(reading)
            with writing:
                process = ctx.Process(target=_run, args=(fn, index, args, writing), daemon=daemon)
                process.ends_with_parent = True
                process.start()
            processes.append(process)
    except BaseException:
        ProcessContext(processes, reports[: len(processes)]).end(0.0)
        for end in reports:
            end.close()
        raise
    context = ProcessContext(processes, reports)
    if not join:
        return context
    try:
        while not context.join():
            pass
    except BaseException:
        context.end(0.0)
        raise
    return None


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Call ``fn(index, *args)`` in `nprocs` fresh interpreters: `start_processes` with ``"spawn"``.

    Parameters, result and errors are those of `start_processes`; another `start_method` is ignored with a
    `FutureWarning`, as in torch.

    Examples
    --------
    >>> def work(index, x):
    ...     x[index] = index
    >>> x = nbparallel.zeros(2)
    >>> spawn(work, args=(x,), nprocs=2)  # doctest: +SKIP
    """
    if start_method != "spawn":
        warnings.warn(
            f"spawn always starts fresh interpreters, and so ignores start_method={start_method!r}: "
            "call start_processes",
            FutureWarning,
            stacklevel=2,
        )
    return start_processes(fn, args, nprocs, join, daemon, "spawn")
