"""Escalation: how the ranks of one task are made to stop, from a first interrupt to a kill.

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

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from nbparallel.errors import rank_list
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.session.tasks.cell import CellOptions
from nbparallel.wire.control import IMPORT_SECONDS, ControlView

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
            self._kill_all(running)
            return
        stuck = [handle.rank for handle in running if handle.busy]  # the answers of others are being read
        if count == 2 and stuck:
            self._note(f"{rank_list(stuck)} not stopped yet (in C code?); interrupt once more to end them")
        for handle in running:
            self._send(handle)

    def poll(self, running: Sequence[RankHandle]) -> None:
        """Take the steps that are due by the clock."""
        if self.poll_seconds is None:
            return
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline and not self.timed_out and running:
            self.timed_out = True
            for handle in running:
                self._send(handle)
        if self._failed_at is not None and now - self._failed_at >= GRACE_SECONDS:
            self._interrupt_for_peer(running)
        for handle in running:
            if handle.rank in self._sent and now - self._sent[handle.rank][1] >= REPEAT_SECONDS:
                self._send(handle)
        wanted = self.interrupted or self.timed_out
        if wanted and self._since is not None:
            self._kill_all([each for each in running if now - self._since >= self._limit(each.rank)])

    def _limit(self, rank: int) -> float:
        """Return how long after the first interrupt a rank is killed."""
        importing, ended = self._control.read_progress(rank)
        if ended == self._task:
            return REPORT_SECONDS
        return KILL_SECONDS + IMPORT_SECONDS * (importing == self._task)

    def _interrupt_for_peer(self, running: Sequence[RankHandle]) -> None:
        """Interrupt ranks once because another one has failed."""
        if self.interrupted or self.timed_out:
            return
        for handle in running:
            if handle.rank not in self.interrupted_for_peer:
                self.interrupted_for_peer.add(handle.rank)
                self._send(handle)

    def _send(self, handle: RankHandle) -> None:
        """Interrupt one rank: the word in the control segment first, then the signal."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        sequence = self._sent.get(handle.rank, (0, 0.0))[0] + 1
        self._sent[handle.rank] = sequence, now
        self._control.write_interrupt(handle.rank, self._task, sequence)
        handle.signal(signal.SIGINT)

    def _kill_all(self, running: Sequence[RankHandle]) -> None:
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
            handle.kill_unless_answered(self._task, UNANSWERED, partial(note, handle.rank))
