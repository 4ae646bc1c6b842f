"""The stop button, pressed in the very moment in which the last rank answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.tasks.task_run import TaskRun
from nbparallel.wire.messages import Outcome


@pytest.mark.parametrize("late", [True, False])
def test_no_press_is_lost(late: bool) -> None:
    """With nobody left to interrupt, the notebook's own code is interrupted."""
    handle: Any = SimpleNamespace(rank=0, death=None)
    ended = Outcome(1, 0, True, False, None, "", "", None, False, 1, 0, ())
    presses = InterruptCounter()

    def next_event(seconds: float | None) -> tuple[Any, Any]:
        if late:
            presses.press()
        return handle, ended

    nothing: Any = None
    run = TaskRun(
        1, {0: handle}, nothing, nothing, next_event=next_event, kill=nothing, timeout=None, go_on=False,
        listen=nothing,
    )  # fmt: skip
    if late:
        with pytest.raises(KeyboardInterrupt), presses:
            run.wait(presses)
    else:
        with presses:
            run.wait(presses)
    assert run.outcomes == {0: ended}
    assert not run.interrupted
