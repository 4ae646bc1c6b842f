"""TaskRun: waiting for one task on its ranks; first failure, interrupts, deaths, time-out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from nbparallel.errors import rank_list
from nbparallel.session.interrupts import KILL_SECONDS, InterruptCounter, InterruptEscalation
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.rank_handle import RankExit, RankHandle
from nbparallel.session.tasks import input
from nbparallel.wire.control import ControlView
from nbparallel.wire.messages import InputRequest, Outcome

GRACE_SECONDS = 1.0
"""After the first failure ranks that still compute are left alone for so long."""
SLICE_SECONDS = 0.25
"""The waiting thread looks around at least this often while something may be due."""


class TaskRun:
    """One task on its way.

    Parameters
    ----------
    handles : Mapping[int, RankHandle]
        The ranks that take part.
    next_event : callable
        ``next_event(timeout)`` returns (handle, message) or None.
    kill : callable
        Ends a rank at once.
    go_on : bool
        Whether the others run to their end when a rank fails.
    listen : callable
        ``listen(listener)`` has every event told to ``listener(message)`` as it comes, in another thread.
    """

    def __init__(
        self,
        number: int,
        handles: Mapping[int, RankHandle],
        output: TaskOutput,
        control: ControlView,
        *,
        next_event: Callable[[float | None], tuple[RankHandle, Any] | None],
        kill: Callable[[RankHandle], None],
        timeout: float | None,
        go_on: bool = False,
        listen: Callable[[Callable[[Any], None]], None] = lambda listener: None,
    ) -> None:
        self.number = number
        self._handles = handles
        self._output = output
        self._next_event = next_event
        self._kill = kill
        self._escalation = InterruptEscalation(control, number)
        self.timeout = timeout
        """Seconds, or None."""
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self.outcomes: dict[int, Outcome] = {}
        self.deaths: dict[int, RankExit] = {}
        self.freed: set[int] = set()
        """Ranks that were interrupted because another one had failed."""
        self.interrupted = False
        """Whether the user interrupted."""
        self.timed_out = False
        self._failed_at: float | None = None
        self._killed: set[int] = set()
        self._listen, self._go_on = listen, go_on
        self._questions: list[input.Question] = []

    @property
    def running(self) -> list[RankHandle]:
        """Ranks that have not ended the task."""
        return [
            handle
            for rank, handle in self._handles.items()
            if rank not in self.outcomes and rank not in self.deaths
        ]

    def wait(self, presses: InterruptCounter) -> None:
        """Wait until every rank has ended the task, died, or been ended."""
        for rank, handle in self._handles.items():
            if handle.death is not None:  # it died before the task reached it
                self._take(handle, handle.death)
                del rank
        while self.running:
            event = self._next_event(self._slice())
            if event is not None:
                self._take(*event)
            # With the last rank's answer in hand nobody is left to interrupt: then it is raised by who waits.
            if presses.count > presses.answered and self.running:
                presses.answered = presses.count
                self._press(presses.count)
            self._look_at_the_clock()
            if self._questions:
                self._ask(presses)

    def _slice(self) -> float | None:
        if self._failed_at is not None or self._escalation.since is not None or self._deadline is not None:
            return SLICE_SECONDS
        return None  # a press wakes us as well

    def _take(self, handle: RankHandle, message: Any) -> None:
        if self._handles.get(handle.rank) is not handle:
            return
        if isinstance(message, Outcome) and message.number == self.number:
            self.outcomes[handle.rank] = message
            if not message.ok:
                self._note_failure()
        elif isinstance(message, InputRequest) and message.task == self.number:
            self._questions.append((handle, message))
        elif isinstance(message, RankExit):
            self.deaths.setdefault(handle.rank, message)
            self._note_failure()

    def _ask(self, presses: InterruptCounter) -> None:
        """Have the user answer one rank's question; questions of several ranks at once are refused."""
        deadline = time.monotonic() + input.GATHER_SECONDS
        while time.monotonic() < deadline and len(self._questions) < len(self.running):
            event = self._next_event(deadline - time.monotonic())
            if event is not None:
                self._take(*event)
        questions, self._questions = self._questions, []
        if len(questions) > 1:
            input.refuse(questions)
        elif self._failed_at is None and not self.interrupted and not self.timed_out:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            alarm = threading.Timer(left or 0.0, presses.excuse) if left is not None else None
            if not self._go_on:
                self._listen(lambda message: presses.excuse() if input.failed(message) else None)
            try:
                if alarm is not None:
                    alarm.start()
                input.ask(questions[0], presses)
            finally:
                self._listen(lambda message: None)
                if alarm is not None:
                    alarm.cancel()
                    alarm.join()

    def _note_failure(self) -> None:
        if self._failed_at is None and not self._go_on:
            self._failed_at = time.monotonic()

    def _press(self, count: int) -> None:
        running = self.running
        self.interrupted = True
        if count >= 3:
            self._end(running)
            return
        if count == 2:
            stuck = rank_list(handle.rank for handle in running)
            self._output.note(f"{stuck} not stopped yet (in C code?); interrupt once more to end them")
        for handle in running:
            self._escalation.interrupt(handle)

    def _look_at_the_clock(self) -> None:
        if self._deadline is None and self._failed_at is None and self._escalation.since is None:
            return  # nothing is ever due
        now = time.monotonic()
        running = self.running
        if self._deadline is not None and now >= self._deadline and not self.timed_out and running:
            self.timed_out = True
            for handle in running:
                self._escalation.interrupt(handle)
        if self._failed_at is not None and now - self._failed_at >= GRACE_SECONDS:
            for handle in running:
                if handle.rank not in self.freed and not self.interrupted and not self.timed_out:
                    self.freed.add(handle.rank)
                    self._escalation.interrupt(handle)
        self._escalation.repeat(running)
        wanted = self.interrupted or self.timed_out
        since = self._escalation.since
        if wanted and since is not None and now - since >= KILL_SECONDS:
            self._end(running)

    def _end(self, running: list[RankHandle]) -> None:
        """End ranks that do not answer; their deaths come as events."""
        for handle in running:
            if handle.rank not in self._killed:
                self._killed.add(handle.rank)
                handle.ended_because = "ended, because it did not answer the interrupt"
                self._output.note(f"rank {handle.rank} did not answer the interrupt and was ended")
                self._kill(handle)
