"""Cells in flight: one on the ranks, others that wait for their turn, each for the one before it."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from nbparallel.errors import BusyError
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import GatheredNames
from nbparallel.session.output import OutputSink, TaskOutput
from nbparallel.session.processes.elastic_pool import ElasticPool
from nbparallel.session.results import CellResult
from nbparallel.session.session_lock import SessionLock
from nbparallel.session.tasks.cell import CellOptions, check_cell, select_ranks
from nbparallel.session.tasks.dispatch import TaskDispatcher
from nbparallel.session.tasks.pending_cell import PendingCell
from nbparallel.session.tasks.task_run import TaskRun

LONGEST_WAIT = 1.0
"""Seconds between two looks whether the cell before has ended, which ends the wait by itself."""
BUSY_SECONDS = 0.02
"""Between two looks whether something has ended that is no cell of the queue, such as `Session.call`."""


class _Launch(Protocol):
    def __call__(
        self,
        cell: str,
        ranks: Iterable[int] | None,
        options: CellOptions,
        interrupts: InterruptCounter,
        names: GatheredNames | None = None,
    ) -> TaskRun: ...


class QueuedCell(PendingCell):
    """A cell that begins when the one before it has ended; its thread waits for that first.

    Parameters
    ----------
    before : PendingCell or None
        None: something else has the ranks.
    sink : OutputSink, TaskOutput or None
        Its `finish` is called if the cell is cancelled before it begins.
    """

    def __init__(
        self,
        before: PendingCell | None,
        session_lock: SessionLock,
        launch: Callable[[InterruptCounter], TaskRun],
        finish: Callable[[TaskRun, InterruptCounter], CellResult],
        sink: OutputSink | TaskOutput | None,
    ) -> None:
        self._before, self._session_lock, self._sink = before, session_lock, sink
        self._nudge = threading.Event()
        interrupts = InterruptCounter()
        interrupts.wake = self._nudge.set
        super().__init__(partial(self._run_in_turn, launch, finish), interrupts, lambda _: None, None)
        if before is not None:
            before.precede(self._on_end)

    @property
    def waits_for(self) -> PendingCell | None:
        """The cell before this one, until that has ended."""
        return self._before

    def _on_end(self, before: PendingCell) -> None:
        """Go on; behind a cell that was cancelled while it waited, wait for what that one waited for."""
        self._before = further = before.waits_for
        if further is not None:
            further.precede(self._on_end)
        self._nudge.set()

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
            run = launch(interrupts)
            self._output = run.output
            return finish(run, interrupts)

    def _wait_for_turn(self, turn: contextlib.ExitStack) -> InterruptCounter:
        """Wait until the ranks are free, and take them; an interrupt that comes before raises."""
        while True:
            self._interrupts.check()
            if self._before is not None:  # `_on_end` forgets it: its result is its own
                self._nudge.wait(LONGEST_WAIT)
                self._nudge.clear()
                continue
            try:
                interrupts = turn.enter_context(self._session_lock.hold())
            except BusyError:
                self._nudge.wait(BUSY_SECONDS)
                continue
            self._interrupts.wake = interrupts.add
            if self._interrupts.count > interrupts.count:  # it came in this moment
                interrupts.add()
            return interrupts


class CellQueue:
    """The cells of a session for which its caller does not wait.

    Parameters
    ----------
    tasks : TaskDispatcher
        Finds what a queued cell uses of the notebook.
    ranks : ElasticPool
        Knows how many there are.
    launch : callable
        ``launch(cell, ranks, options, interrupts, names)`` sends a cell to its ranks.
    finish : callable
        ``finish(run, interrupts)`` waits for them.
    """

    def __init__(
        self,
        session_lock: SessionLock,
        tasks: TaskDispatcher,
        ranks: ElasticPool,
        launch: _Launch,
        finish: Callable[[TaskRun, InterruptCounter], CellResult],
    ) -> None:
        self._session_lock, self._tasks, self._ranks = session_lock, tasks, ranks
        self._launch, self._finish = launch, finish
        self._last: weakref.ref[PendingCell] | None = None
        """The cell that was submitted last; it lives while it, or what it waits for, has not ended."""

    def submit(
        self, cell: str, ranks: Iterable[int] | None, options: CellOptions, *, queue: bool
    ) -> PendingCell:
        """Start a cell, or put it behind those that were submitted before it; raises as `Session.submit`."""
        made: list[PendingCell] = []
        try:
            if queue and (self._unfinished() is not None or self._session_lock.held):
                self._put_behind(cell, ranks, options, made)
            else:
                self._start(cell, ranks, options, made)
            self._last = weakref.ref(made[0])
            return made[0]
        except BaseException:
            for pending in made:  # an interrupt at the very end, and no caller has the cell
                pending.cancel()
            raise

    def _start(
        self, cell: str, ranks: Iterable[int] | None, options: CellOptions, made: list[PendingCell]
    ) -> None:
        with self._session_lock.hold() as interrupts, self._tasks.stopping(interrupts):
            run = self._launch(cell, ranks, options, interrupts)
            finish = partial(self._finish, run, interrupts)
            made.append(PendingCell(finish, interrupts, self._session_lock.release, run.output))

    def _put_behind(
        self, cell: str, ranks: Iterable[int] | None, options: CellOptions, made: list[PendingCell]
    ) -> None:
        if options.share:
            raise BusyError(
                "a cell that waits for its turn cannot share arrays, because they may have to be moved: "
                "%share them before, or leave out --queue"
            )
        with InterruptCounter():
            check_cell(cell, options)
            names = self._tasks.gather(cell, options, select_ranks(ranks, self._ranks.world_size))
            launch: Any = partial(self._launch, cell, ranks, options, names=names)
            launch = partial(
                contextvars.copy_context().run, launch
            )  # numpy's and decimal's settings are there
            made.append(
                QueuedCell(self._unfinished(), self._session_lock, launch, self._finish, options.sink)
            )

    def _unfinished(self) -> PendingCell | None:
        last = None if self._last is None else self._last()
        while last is not None and last.done():
            last = last.waits_for
        return last
