"""The stop button, pressed in the very moment in which the last rank answers, or in which a rank ends."""

from __future__ import annotations

import contextlib
import itertools
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from nbparallel.engine import interrupts as rank_interrupts
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.tasks.task_run import TaskRequest, TaskRun
from nbparallel.wire.messages import Outcome
from tests.faults.interrupts.instruction_signals import InstructionSignals


@pytest.mark.parametrize("late", [True, False])
def test_no_interrupt_is_lost(late: bool) -> None:
    """With nobody left to interrupt, the notebook's own code is interrupted."""
    handle: Any = SimpleNamespace(rank=0, death=None)
    ended = Outcome(1, 0, True, False, None, "", "", None, False, 1, 0, ())
    interrupts = InterruptCounter()

    def next_event(seconds: float | None) -> tuple[Any, Any]:
        if late:
            interrupts.add()
        return handle, ended

    nothing: Any = None
    pool: Any = SimpleNamespace(next_event=next_event, supervisor=SimpleNamespace(kill=nothing))
    output: Any = SimpleNamespace(note=nothing)
    run = TaskRun(pool, TaskRequest(1, (0,), nothing), {0: handle}, nothing, output)
    if late:
        with pytest.raises(KeyboardInterrupt), interrupts:
            run.wait(interrupts)
    else:
        with interrupts:
            run.wait(interrupts)
    assert run.outcomes == {0: ended}
    assert not run.escalation.interrupted


def test_no_interrupt_leaves_a_task_armed() -> None:
    """At whatever step of a task's beginning or end it comes: a later one would end the rank."""
    sequence = itertools.count(1)
    words: Any = SimpleNamespace(read_interrupt=lambda rank: (7, next(sequence)))
    armed = rank_interrupts.Interrupts(0)
    armed.words = words

    def task() -> None:
        try:
            armed.arm(7)
        except KeyboardInterrupt:
            pass
        finally:
            armed.disarm()

    former = signal.getsignal(signal.SIGINT)
    try:
        counted = InstructionSignals([rank_interrupts.__file__], signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        counted.run(task)
        assert counted.count > 10
        for at in range(1, counted.count + 1):
            armed.install()
            with contextlib.suppress(KeyboardInterrupt):
                InstructionSignals([rank_interrupts.__file__], signal.SIGINT, at).run(task)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pytest.fail(f"still armed after an interrupt at instruction {at}")
    finally:
        signal.signal(signal.SIGINT, former)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
