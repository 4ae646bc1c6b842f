"""TaskRun: one task on its ranks, from the moment it is sent until every rank has ended it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from nbparallel.distributed.runtime.observers import cell_observer
from nbparallel.errors import NbParallelError
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import Preparation
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.rank_death import RankDeath
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.tasks import input
from nbparallel.session.tasks.cell import CellOptions
from nbparallel.session.tasks.escalation import InterruptEscalation
from nbparallel.wire.control import ControlView
from nbparallel.wire.messages import CellTask, InputRequest, Outcome, Task

TaskFactory: TypeAlias = Callable[[RankPool, int, tuple[int, ...]], tuple[Task, object]]
"""``make(pool, number, ranks)`` returns a task for all ranks, and what owns memory that it refers to."""


class TaskWatch(Protocol):
    """Follows a task while it runs."""

    look_seconds: float
    """How often it looks."""
    fds: tuple[int, ...]
    """Descriptors that travel with the task."""

    def look(self, control: ControlView) -> None:
        """Look what the ranks say of themselves; called by the thread that waits for them."""

    def place(self, control: ControlView, rank: int) -> str:
        """Return what a rank that failed was at, in words; nothing if that is not known."""


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """What to send to which ranks, and how to run it."""

    number: int
    """No other task of the session has it."""
    ranks: tuple[int, ...]
    """The ranks that take part, ascending."""
    make: Callable[[int], Task]
    """Returns the task of a rank; equal ones are pickled once."""
    options: CellOptions = field(default_factory=CellOptions)
    """As passed to `Session.run`."""
    preparation: Preparation | None = None
    """The notebook's names that travel with a cell."""
    keepalive: object = None
    """Owns memory that the task refers to; released when every rank has ended it."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user; grows until the task has ended."""
    watch: TaskWatch | None = None
    """Follows it."""
    started: float = field(default_factory=time.monotonic)
    """When its preparation began (`time.monotonic`)."""
    fds: tuple[int, ...] = ()
    """Descriptors that travel with it."""


class TaskRun:
    """A task that is on its ranks: takes their events until each has ended it, died or been killed.

    Parameters
    ----------
    handles : dict[int, RankHandle]
        The ranks that were sent the task.
    control : ControlView
        The control segment of the epoch in which it runs.
    """

    def __init__(
        self,
        pool: RankPool,
        request: TaskRequest,
        handles: dict[int, RankHandle],
        control: ControlView,
        output: TaskOutput,
    ) -> None:
        self.pool, self.request, self.handles, self.control = pool, request, handles, control
        self.output = output
        self.escalation = InterruptEscalation(request.number, control, request.options, note=output.note)
        self.task: Task | None = None
        """What was sent to one of the ranks."""
        self.ended_ns = 0
        """When it had ended on every rank, by `time.monotonic_ns`."""
        self.outcomes: dict[int, Outcome] = {}
        self.deaths: dict[int, RankDeath] = {}
        self._questions: list[input.Question] = []

    def findings(self) -> dict[str, Any]:
        """Return what the cell's observers conclude from what ranks have sent of their logs."""
        parts = [part for handle in self.handles.values() for part in handle.observed]
        for handle in self.handles.values():
            handle.observed.clear()
        found = {}
        for observer in self.task.observers if isinstance(self.task, CellTask) else ():
            logs = [
                part.log for part in parts if (part.number, part.observer) == (self.request.number, observer)
            ]
            ended = {rank: end.observed for rank, end in self.outcomes.items() if observer in end.observed}
            logs += [log[observer] for log in ended.values()]
            lost = sorted(set(self.request.ranks) - ended.keys())
            found[observer] = cell_observer(observer).conclude(logs, lost)
        return found

    @property
    def running(self) -> list[RankHandle]:
        """Ranks that have not ended the task."""
        return [
            handle
            for rank, handle in self.handles.items()
            if rank not in self.outcomes and rank not in self.deaths
        ]

    def wait(self, interrupts: InterruptCounter) -> None:
        """Wait until every rank has ended the task, died, or been killed."""
        for handle in self.handles.values():
            if handle.death is not None:  # it died before the task reached it
                self._take(handle, handle.death)
        while self.running:
            try:
                self._step(interrupts)
            except NbParallelError:
                raise
            except BaseException as error:
                # Another thread raised it here (PyThreadState_SetAsyncExc, as some time-outs do): no rank may
                # go on after this returns.
                if not interrupts.keep(error):
                    raise

    def _step(self, interrupts: InterruptCounter) -> None:
        """Wait for one event, and act on it and on interrupts."""
        watch, seconds = self.request.watch, self.escalation.poll_seconds
        if watch is not None:
            watch.look(self.control)
            seconds = watch.look_seconds if seconds is None else min(seconds, watch.look_seconds)
        event = self.pool.next_event(seconds)  # an interrupt ends this wait as well
        if event is not None:
            self._take(*event)
        # After the last rank's answer there is no rank to interrupt: then the caller's exit raises.
        if interrupts.count > interrupts.answered and self.running:
            interrupts.answered = interrupts.count
            self.escalation.interrupt(interrupts.count, self.running)
        if self.escalation.poll_seconds is not None:
            self.escalation.poll(self.running)
        if self._questions:
            self._ask(interrupts)

    def _take(self, handle: RankHandle, message: Any) -> None:
        if self.handles.get(handle.rank) is not handle:
            return
        if isinstance(message, Outcome) and message.number == self.request.number:
            self.outcomes[handle.rank] = message
            if not message.ok:
                self.escalation.record_failure()
        elif isinstance(message, InputRequest) and message.task == self.request.number:
            self._questions.append((handle, message))
        elif isinstance(message, RankDeath):
            self.deaths.setdefault(handle.rank, message)
            self.escalation.record_failure()

    def _ask(self, interrupts: InterruptCounter) -> None:
        """Have the user answer one rank's question; questions of several ranks together are refused."""
        deadline = time.monotonic() + input.GATHER_SECONDS
        while time.monotonic() < deadline and len(self._questions) < len(self.running):
            event = self.pool.next_event(deadline - time.monotonic())
            if event is not None:
                self._take(*event)
        questions, self._questions = self._questions, []
        if len(questions) > 1 or self.pool.hosts is not None:
            input.refuse(questions, elsewhere=self.pool.hosts is not None)
        elif not self.escalation.ending:
            left = self.escalation.seconds_left
            alarm = None if left is None else threading.Timer(left, interrupts.end_raising)
            if not self.escalation.go_on:
                self.pool.listen(lambda message: interrupts.end_raising() if input.failed(message) else None)
            try:
                if alarm is not None:
                    alarm.start()
                input.ask(questions[0], interrupts)
            finally:
                self.pool.listen(lambda message: None)
                if alarm is not None:
                    alarm.cancel()
                    alarm.join()
