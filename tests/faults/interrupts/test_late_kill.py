"""F24: the third interrupt and a rank that answers in that moment: no other cell pays for it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from nbparallel.session import Session
from nbparallel.session.processes.supervisor_client import SupervisorClient
from nbparallel.session.tasks.cell import CellOptions
from nbparallel.session.tasks.task_run import InterruptEscalation
from nbparallel.testing.waiting import wait_until
from tests.harness.ranks import rank_pool

STUBBORN = """
import time
while not flag[0]:
    try:
        flag[1] = 1
        time.sleep(0.002)
    except KeyboardInterrupt:
        pass
kept = 1
"""
"""It says that it is there inside of the ``try``: before it, an interrupt would end the cell."""


@pytest.mark.slow
def test_f24_a_rank_that_has_answered_is_not_killed() -> None:
    """An answer that is there counts, also if the thread that waits has not read it yet."""
    notes: list[str] = []
    with Session(1) as session:
        session.run("kept = 1")
        pool = rank_pool(session)
        assert pool.control is not None
        (rank,) = pool.handles
        ladder = InterruptEscalation(rank.task, pool.control, CellOptions(), note=notes.append)
        for count in (1, 2, 3):
            ladder.interrupt(count, [rank])
        assert list(session.run("kept").values) == [1]
        assert notes == []
        assert session.run("pass").notes == ()


@pytest.mark.slow
def test_f24_a_rank_that_answers_while_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death belongs to the cell that was interrupted: the next one starts it again, and runs."""
    flag = np.zeros(2)
    names: dict[str, Any] = {"flag": flag}
    kill = SupervisorClient.kill

    def answer_first(self: SupervisorClient, handle: Any) -> None:
        names["flag"][0] = 1  # shared: the rank ends the cell now, and its answer waits in the socket
        time.sleep(0.2)
        kill(self, handle)

    with Session(1) as session:
        session.run("pass")
        with monkeypatch.context() as patched:
            patched.setattr(SupervisorClient, "kill", answer_first)
            pending = session.submit(STUBBORN, namespace=names, share=["flag"])
            wait_until(lambda: names["flag"][1])
            for _ in range(3):
                pending.cancel()
                time.sleep(0.02)
            assert isinstance(pending.exception(10), KeyboardInterrupt)
        result = session.run("globals().get('kept')")
        assert list(result.values) == [None]
        (note,) = result.notes
        assert note.startswith("rank 0 was ended: no answer to the interrupt; it was started")
