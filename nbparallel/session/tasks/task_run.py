"""TaskRun: one task on its ranks, from the moment it is sent until every rank has ended it.

One Ctrl-C; the ranks, in sessions of their own, do not get the terminal's SIGINT::

    kernel   InterruptCounter._on_signal     count += 1; RankPool.wake ends the thread's wait
             TaskRun.wait                    count > answered:
               InterruptEscalation.interrupt
                 _send, for each rank        the word (task, sequence) in the control segment, then SIGINT
    rank     engine Interrupts._on_signal    the word names this task, a new sequence: KeyboardInterrupt
             tasks.run_task                  the failure, in the task's outcome
    kernel   TaskRun.wait                    every rank has ended the task; else `poll` repeats, then kills
             outcomes.raise_if_failed        KeyboardInterrupt, with the result so far
"""

from __future__ import annotations

import getpass
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from nbparallel.errors import NbParallelError, rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import Preparation
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.elastic_pool import TaskPool
from nbparallel.session.processes.rank_handle import RankDeath, RankHandle
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.tasks.cell import CellOptions
from nbparallel.wire.control import IMPORT_SECONDS, ControlView
from nbparallel.wire.frames import Kind
from nbparallel.wire.messages import InputReply, InputRequest, ObservedPart, Outcome, Task

GATHER_SECONDS = 0.15
"""Time that a first question waits for those of other ranks, all of which are refused; arbitrary."""

Question = tuple[RankHandle, InputRequest]


def refuse_questions(questions: Sequence[Question], reason: str) -> None:
    """Refuse questions that several ranks asked together, or for another reason."""
    ranks = rank_list(handle.rank for handle, _ in questions)
    refusal = (
        f"{ranks} called input() at the same time, and there is one keyboard: let one rank ask "
        "(`if rank == 0:`) and send the answer to the others (`broadcast`)"
    )
    if reason:
        refusal = f"no user can be asked for input(): {reason}"
    _answer(questions, refusal=refusal)


def ask_user(question: Question, interrupts: InterruptCounter) -> None:
    """Ask the user one question; an interrupt, or the failure of a rank, ends it without an answer."""
    handle, request = question
    if threading.current_thread() is not threading.main_thread():
        _answer(
            [question],
            refusal="no user can be asked for input(): this cell runs in the background or in a subshell",
        )
        return
    prompt = f"[rank {handle.rank}] {request.prompt}"
    try:
        with interrupts.raising():
            text = getpass.getpass(prompt) if request.secret else input(prompt)
    except KeyboardInterrupt:
        return  # the interrupt was counted, or a rank failed: `TaskRun.wait` acts on both
    except Exception as error:  # noqa: BLE001  a front end without input, a closed stdin: the rank raises it
        why = " ".join(str(error).split()) or type(error).__name__
        _answer([question], refusal=f"no user can be asked for input(): {why}")
        return
    _answer([question], text)


def _answer(questions: Sequence[Question], text: str = "", *, refusal: str = "") -> None:
    for handle, request in questions:
        handle.send(Kind.INPUT, InputReply(request.serial, text, refusal))


GRACE_SECONDS = 1.0
"""Time between the first failure and the interrupt of ranks that still compute."""
REPEAT_SECONDS = 0.5
"""Time between two interrupts of a rank: the code that one hit may have swallowed the exception."""
KILL_SECONDS = 5.0
"""Time between the first interrupt and the kill of ranks that have not stopped."""
REPORT_SECONDS = 14.0
"""The same for a rank whose code has stopped: its report asks the user's errors for their texts."""
POLL_SECONDS = 0.25
"""Longest sleep of the waiting thread while a step may be due."""
LOOK_SECONDS = 0.1
"""Between two looks of what follows a task."""
UNANSWERED = "ended: no answer to the interrupt"


class InterruptEscalation:
    """Interrupts the ranks of one task in steps until every one has stopped.

    The steps, for ranks that still run the task:

    1. the user interrupts, the time-out passes, or a rank has failed `GRACE_SECONDS` ago: SIGINT;
    2. `REPEAT_SECONDS` later, and so on: SIGINT;
    3. the user interrupts a second time: SIGINT, and a note that names the ranks;
    4. the user interrupts a third time, or `KILL_SECONDS` have passed since the first SIGINT: the rank is
       killed.  By the clock `IMPORT_SECONDS` later if an import held the interrupt back, and after
       `REPORT_SECONDS` if the code has ended and the report is under way.  After the failure of another rank
       alone no rank is killed: it may be in a long C function.

    Parameters
    ----------
    task : int
        Number of the task; a rank ignores interrupts that name another one.
    options : CellOptions
        Their `timeout` counts from now; with `go_on` a failure interrupts no other rank.
    note : callable
        Shows a line to the user.
    """

    def __init__(
        self,
        task: int,
        control: ControlView,
        options: CellOptions,
        *,
        note: Callable[[str], None],
    ) -> None:
        self._task, self._control, self._note = task, control, note
        self.timeout = options.timeout
        """Seconds, or None."""
        self.go_on = options.go_on
        """Whether the other ranks run to their end when one fails."""
        self.interrupted = False
        """Whether the user interrupted."""
        self.timed_out = False
        """Whether the time-out passed."""
        self.interrupted_for_peer: set[int] = set()
        """Ranks that were interrupted because another one had failed."""
        self._deadline = None if self.timeout is None else time.monotonic() + self.timeout
        self._failed_at: float | None = None
        self._since: float | None = None
        self._sent: dict[int, tuple[int, float]] = {}
        self._killed: set[int] = set()

    @property
    def poll_seconds(self) -> float | None:
        """Return after how many seconds `poll` has to be called again; None: not before the next event."""
        due = self._failed_at is not None or self._since is not None or self._deadline is not None
        return POLL_SECONDS if due else None

    @property
    def ending(self) -> bool:
        """Whether the task is to end early: a rank failed, the user interrupted, or the time-out passed."""
        return self._failed_at is not None or self.interrupted or self.timed_out

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the time-out; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def record_failure(self) -> None:
        """Record that a rank has failed or died (idempotent)."""
        if self._failed_at is None and not self.go_on:
            self._failed_at = time.monotonic()

    def interrupt(self, count: int, running: Sequence[RankHandle]) -> None:
        """Act on the user's interrupt number `count`."""
        self.interrupted = True
        if count >= 3:
            self.end(running)
            return
        stuck = [handle.rank for handle in running if handle.busy]  # the answers of others are being read
        if count == 2 and stuck:
            self._note(f"{rank_list(stuck)} not stopped yet (in C code?); interrupt once more to end them")
        for handle in running:
            self._send(handle)

    def poll(self, running: Sequence[RankHandle]) -> None:
        """Take the steps that are due by the clock."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline and not self.timed_out and running:
            self.timed_out = True
            for handle in running:
                self._send(handle)
        wanted = self.interrupted or self.timed_out
        if self._failed_at is not None and now - self._failed_at >= GRACE_SECONDS and not wanted:
            for handle in running:
                if handle.rank not in self.interrupted_for_peer:
                    self.interrupted_for_peer.add(handle.rank)
                    self._send(handle)
        for handle in running:
            if handle.rank in self._sent and now - self._sent[handle.rank][1] >= REPEAT_SECONDS:
                self._send(handle)
        if wanted and self._since is not None:
            self.end([each for each in running if now - self._since >= self.limit(each.rank)])

    def limit(self, rank: int) -> float:
        """Return how many seconds after the first interrupt a rank is killed."""
        importing, ended = self._control.read_progress(rank)
        if ended == self._task:
            return REPORT_SECONDS
        return KILL_SECONDS + IMPORT_SECONDS * (importing == self._task)

    def _send(self, handle: RankHandle) -> None:
        """Interrupt one rank: the word in the control segment first, then the signal."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        sequence = self._sent.get(handle.rank, (0, 0.0))[0] + 1
        self._sent[handle.rank] = sequence, now
        self._control.write_interrupt(handle.rank, self._task, sequence)
        handle.signal(signal.SIGINT)

    def end(self, running: Sequence[RankHandle], because: str = UNANSWERED) -> None:
        """Kill ranks that do not answer; their ends arrive as events."""
        asked = [handle for handle in running if handle.rank not in self._killed]
        self._killed.update(handle.rank for handle in asked)
        decided: dict[int, bool] = {}

        def note(rank: int, killed: bool) -> None:
            decided[rank] = killed
            ended = [rank for rank, killed in decided.items() if killed]
            if ended and len(decided) == len(asked):
                was = "was" if len(ended) == 1 else "were"
                self._note(f"{rank_list(ended)} did not answer the interrupt and {was} ended")

        for handle in asked:
            handle.kill_unless_answered(self._task, because, partial(note, handle.rank))


TaskFactory: TypeAlias = Callable[[TaskPool, int, tuple[int, ...]], tuple[Task, object]]
"""``make(pool, number, ranks)`` returns a task for all ranks, and what owns memory that it refers to."""


class TaskWatch(Protocol):
    """Follows a task while it runs."""

    fds: tuple[int, ...]
    """Descriptors that travel with the task."""

    go_on: bool
    """Whether the other ranks run to their end when one fails."""
    overdue: str
    """Why a rank is ended that goes on for long after it should have stopped by itself."""

    def look(self, control: ControlView) -> dict[int, float]:
        """Look what the ranks say of themselves; return which should have stopped so many seconds ago.

        It and `take` are called by the thread that waits for the ranks.
        """

    def take(self, part: Any) -> None:
        """Take what a rank has sent before its end."""

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
        pool: TaskPool,
        request: TaskRequest,
        handles: dict[int, RankHandle],
        control: ControlView,
        output: TaskOutput,
    ) -> None:
        self.pool, self.request, self.handles, self.control = pool, request, handles, control
        self.output = output
        self.escalation = InterruptEscalation(request.number, control, request.options, note=output.note)
        if request.watch is not None:
            self.escalation.go_on = request.watch.go_on
        self.task: Task | None = None
        """What was sent to one of the ranks."""
        self.ended_ns = 0
        """When it had ended on every rank, by `time.monotonic_ns`."""
        self.outcomes: dict[int, Outcome] = {}
        self.deaths: dict[int, RankDeath] = {}
        self._questions: list[Question] = []
        self._parts: list[ObservedPart] = []
        """Of logs of observers, sent before the end."""
        self.closing: Callable[[], list[tuple[int, int]]] = list
        """Called when every rank has ended it; returns pairs of ranks of which only the receiver is here."""

    @property
    def rank_pool(self) -> RankPool:
        """The ranks of this machine, on which it runs."""
        assert isinstance(self.pool, RankPool), "others have a run of their own"
        return self.pool

    def findings(self) -> dict[str, Any]:
        """Return what the cell's observers conclude from what ranks have sent of their logs."""
        found = {}
        for observer in getattr(self.task, "observers", ()):
            from nbparallel.distributed.runtime.observers import cell_observer  # brings all operations

            logs = [part.log for part in self._parts if part.observer == observer]
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
            late = watch.look(self.control)
            over = [
                each for each in self.running if late.get(each.rank, -1) >= self.escalation.limit(each.rank)
            ]
            self.escalation.end(over, watch.overdue)
            seconds = LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)
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
        elif isinstance(message, ObservedPart) and message.number == self.request.number:
            if self.request.watch is None or message.observer:
                self._parts.append(message)
            else:
                self.request.watch.take(message.log)
        elif isinstance(message, RankDeath):
            self.deaths.setdefault(handle.rank, message)
            self.escalation.record_failure()

    def _ends(self, handle: RankHandle | None, message: Any) -> bool:
        """Whether an event is the failure of the task, or of the pool: then no question is asked any more."""
        if handle is None:
            return message is None
        failed = isinstance(message, RankDeath) or (isinstance(message, Outcome) and not message.ok)
        return failed and self.handles.get(handle.rank) is handle

    def _ask(self, interrupts: InterruptCounter) -> None:
        """Have the user answer one rank's question; questions of several ranks together are refused."""
        deadline = time.monotonic() + GATHER_SECONDS
        while time.monotonic() < deadline and len(self._questions) < len(self.running):
            event = self.pool.next_event(deadline - time.monotonic())
            if event is not None:
                self._take(*event)
        questions, self._questions = self._questions, []
        pool = self.rank_pool
        reason = pool.place.no_input
        if len(questions) > 1 or reason:
            refuse_questions(questions, reason)
        elif self.escalation.interrupted or self.escalation.timed_out:  # its code went on and asks again
            refuse_questions(questions, "the cell was interrupted")
        elif not self.escalation.ending:
            left = self.escalation.seconds_left
            alarm = None if left is None else threading.Timer(left, interrupts.end_raising)
            if not self.escalation.go_on:
                pool.listener = lambda *event: interrupts.end_raising() if self._ends(*event) else None
            try:
                if alarm is not None:
                    alarm.start()
                self.output.show_now()
                ask_user(questions[0], interrupts)
            finally:
                pool.listener = lambda *_: None
                if alarm is not None:
                    alarm.cancel()
                    alarm.join()
