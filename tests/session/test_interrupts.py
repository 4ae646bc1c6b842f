"""The stop button, pressed in the very moment in which the last rank answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.tasks.task_run import TaskRequest, TaskRun
from nbparallel.wire.messages import Outcome


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
