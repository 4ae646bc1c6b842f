"""Cells in flight: one on the ranks, others that wait in a line for their turn."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from nbparallel.errors import BusyError, NbParallelError
from nbparallel.session.interrupts import InterruptCounter, SessionLock
from nbparallel.session.output import OutputSink, TaskOutput
from nbparallel.session.processes.launch import as_start_error
from nbparallel.session.results import CellResult
from nbparallel.session.tasks.task_run import TaskRun

__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here


class PendingCell:
    """A cell that runs in the background, with the methods of `concurrent.futures.Future`.

    A thread waits for the ranks; it ends with the cell.
    """

    def __init__(
        self,
        finish: Callable[[], CellResult],
        interrupts: InterruptCounter,
        release: Callable[[InterruptCounter], None],
        output: TaskOutput | None,
    ) -> None:
        self._finish: Callable[[], CellResult] | None = finish
        self._interrupts, self._release, self._output = interrupts, release, output
        self._callbacks: list[Callable[[PendingCell], None]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._result: CellResult | None = None
        self._error: BaseException | None = None
        # Daemonic: at the end of the program the session is stopped, which ends the cell.
        self._thread = threading.Thread(target=self._run, name="nbparallel-pending", daemon=True)
        interrupts.handed_over = True
        try:
            with as_start_error("a thread that waits for the cell"):
                self._thread.start()
        except BaseException:  # without it the cell must not run either
            interrupts.handed_over = False
            interrupts.add()
            with contextlib.suppress(KeyboardInterrupt, NbParallelError):
                finish()
            raise

    def _run(self) -> None:
        finish, self._finish = self._finish, None  # a handle can be kept, and keeps nothing but the result
        assert finish is not None, "the thread runs once"
        try:
            self._result = finish()
        except BaseException as error:  # noqa: BLE001  `result` raises it
            self._error = error.with_traceback(None)
        finally:
            del finish  # before a waiting thread goes on: it holds the run, or names of the notebook
            self._release(self._interrupts)
            self._interrupts.wake = lambda: None
            with self._lock:
                self._ended.set()
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                self._call(callback)

    def _call(self, callback: Callable[[PendingCell], None]) -> None:
        """Call a callback; what it raises is shown, as a thread's is, and stops no other."""
        try:
            callback(self)
        except Exception as error:  # noqa: BLE001  whatever the user's code raises
            hooked = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(hooked))

    @property
    def state(self) -> str:
        """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``."""
        if not self._ended.is_set():
            return "queued" if self._output is None else "running"
        if self._error is None:
            return "done"
        return "cancelled" if isinstance(self._error, KeyboardInterrupt) else "failed"

    def done(self) -> bool:
        """Return whether every rank has ended the cell."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the cell has ended, at most `timeout` seconds; return whether it has."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> CellResult:
        """Wait for the cell and return its result, or raise what `Session.run` would have raised.

        Raises
        ------
        TimeoutError
            The cell still runs after `timeout` seconds; it is not interrupted.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)
        assert self._result is not None, "it has ended without an error"
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the cell and return what `result` would raise, None if nothing; errors as `result`."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the cell still runs after {timeout:g} s; it goes on")
        return self._error

    def cancel(self) -> bool:
        """Interrupt the cell as the notebook's stop button does; return False if it has ended.

        Does not wait.  A second call names the ranks that do not answer, a third one kills them.
        """
        if self._ended.is_set():
            return False
        self._interrupts.add()
        return True

    def stdout(self, rank: int) -> str:
        """Return what a rank has printed so far, or in all."""
        result: CellResult | None = getattr(self._error, "result", self._result)
        if result is not None:
            return result.ranks[rank].stdout if rank in result.ranks else ""
        return "" if self._output is None else self._output.text(rank, "stdout")

    def add_done_callback(self, function: Callable[[PendingCell], None]) -> None:
        """Call ``function(self)`` when the cell has ended, in another thread; now, if it has."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(function)
                return
        self._call(function)

    def __repr__(self) -> str:
        return f"<PendingCell, {self.state}>"


LONGEST_WAIT = 1.0
"""Seconds between two looks whether the ranks are free, or a cell has ended, which is notified."""


def wait_for_end(pending: PendingCell) -> None:
    """Wait until a cell has ended; an interrupt is sent to its ranks."""
    while not pending.done():
        try:
            pending.wait(LONGEST_WAIT)
        except KeyboardInterrupt:
            pending.cancel()


def end_cell(pending: PendingCell) -> None:
    """Interrupt a cell that has not ended, and wait until it has."""
    if pending.cancel():
        wait_for_end(pending)


class QueuedCell(PendingCell):
    """A cell that begins when the ranks are free and it is the first in `line`; its thread waits for that.

    Parameters
    ----------
    line : deque of QueuedCell
        Cells that have not begun, in order; this one is added.
    sink : OutputSink, TaskOutput or None
        Its `finish` is called if the cell is cancelled before it begins.
    """

    def __init__(
        self,
        line: deque[QueuedCell],
        session_lock: SessionLock,
        launch: Callable[[InterruptCounter], TaskRun],
        finish: Callable[[TaskRun, InterruptCounter], CellResult],
        sink: OutputSink | TaskOutput | None,
    ) -> None:
        self._line, self._session_lock, self._sink = line, session_lock, sink
        self._nudge = threading.Event()
        self.look_again = self._nudge.set
        interrupts = InterruptCounter()
        interrupts.wake = self._nudge.set
        line.append(self)
        super().__init__(partial(self._run_in_turn, launch, finish), interrupts, lambda _: None, None)

    def _run_in_turn(
        self,
        launch: Callable[[InterruptCounter], TaskRun],
        finish: Callable[[TaskRun, InterruptCounter], CellResult],
    ) -> CellResult:
        with contextlib.ExitStack() as turn:
            try:
                interrupts = self._wait_for_turn(turn)
            except BaseException:
                if self._sink is not None:
                    self._sink.finish()  # it never began
                raise
            finally:
                self._line.remove(self)
                nudge_first(self._line)
            run = launch(interrupts)
            self._output = run.output
            return finish(run, interrupts)

    def _wait_for_turn(self, turn: contextlib.ExitStack) -> InterruptCounter:
        """Wait until the ranks are free, and take them; an interrupt that comes before raises."""
        while True:
            self._interrupts.check()
            if self._line[0] is self:
                with contextlib.suppress(BusyError):
                    interrupts = turn.enter_context(self._session_lock.hold())
                    break
            self._nudge.wait(LONGEST_WAIT)
            self._nudge.clear()
        self._interrupts.wake = interrupts.add
        if self._interrupts.count > interrupts.count:  # it came in this moment
            interrupts.add()
        return interrupts


def nudge_first(line: deque[QueuedCell]) -> None:
    """Have the first cell that waits look whether the ranks are free."""
    with contextlib.suppress(IndexError):  # there is none
        line[0].look_again()
