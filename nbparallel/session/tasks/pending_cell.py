"""PendingCell: a cell that runs in the background."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from nbparallel.errors import NbParallelError
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.refusals import as_start_error
from nbparallel.session.results import CellResult

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
        self._successors: list[Callable[[PendingCell], None]] = []
        """Called before those: what the user's do is no matter of the queue."""
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
                callbacks, self._callbacks = [*self._successors, *self._callbacks], []
                self._successors = []
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
    def waits_for(self) -> PendingCell | None:
        """The cell that has to end before this one may begin, also if this one was cancelled first."""
        return None

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
        if self._result is not None:
            return self._result.ranks[rank].stdout if rank in self._result.ranks else ""
        result = getattr(self._error, "result", None)
        if result is not None:
            return str(result.ranks[rank].stdout) if rank in result.ranks else ""
        return "" if self._output is None else self._output.text(rank, "stdout")

    def add_done_callback(self, function: Callable[[PendingCell], None]) -> None:
        """Call ``function(self)`` when the cell has ended, in another thread; now, if it has."""
        self._when_done(self._callbacks, function)

    def precede(self, function: Callable[[PendingCell], None]) -> None:
        """Call ``function(self)`` as `add_done_callback` does, and before all that was added there."""
        self._when_done(self._successors, function)

    def _when_done(
        self, kept: list[Callable[[PendingCell], None]], function: Callable[[PendingCell], None]
    ) -> None:
        with self._lock:
            if not self._ended.is_set():
                kept.append(function)
                return
        self._call(function)

    def __repr__(self) -> str:
        return f"<PendingCell, {self.state}>"
