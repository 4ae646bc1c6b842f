"""What ranks keep alive of a failure: its frames until the next cell, if they hold little."""

from __future__ import annotations

import threading
import time

import pytest

from nbparallel import ParallelError, Session
from nbparallel.session.tasks.dispatch import debug_task
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.messages import MOST_FRAME_NBYTES

FAILS = """
import numpy as np
import weakref
def fail(n):
    part, nested = np.zeros(n), {"rows": [np.zeros(1000)]}
    shared = nbp.zeros(1 << 17)
    watched = nbp.alive = weakref.ref(part)
    raise ValueError(len(nested))
"""
MIB = 1 << 20


@pytest.fixture
def keeping(two_ranks: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return a session that keeps frames, as a notebook's does."""
    monkeypatch.setattr(two_ranks, "keep_frames", True)
    two_ranks.run(FAILS)
    return two_ranks


def failed_ns(session: Session, cell: str) -> int:
    """Run a cell that fails on rank 0, and return when."""
    with pytest.raises(ParallelError) as caught:
        session.run(cell)
    return int(caught.value.failures[0].time_ns)


def refusal(session: Session, failed: int) -> str:
    """Return why rank 0 does not open the debugger."""
    with pytest.raises(ParallelError) as caught:
        session.perform(debug_task(failed), ranks=(0,))
    return str(caught.value.errors[0])


def test_frames_live_until_the_next_cell(keeping: Session) -> None:
    """What they hold is counted, shared arrays too; a pull leaves them, the next cell frees them."""
    unused = keeping.statistics().shared_nbytes
    failed_ns(keeping, f"if rank == 0: fail({MIB})")
    keeping.pull("rank")
    seen = keeping.statistics()
    assert 9 * MIB < seen.frames_nbytes < 9 * MIB + 100_000
    assert seen.shared_nbytes >= unused + MIB
    assert keeping.run("nbp.alive() is None", ranks=[0]).values[0], "gone before the next cell's code runs"
    assert keeping.statistics().frames_nbytes == 0
    wait_until(lambda: keeping.statistics().shared_nbytes == unused)


def test_what_holds_too_much_is_not_kept(keeping: Session) -> None:
    """A variable of the rank's own does not count, also as a view; the debugger says what was too much."""
    keeping.run(f"big = np.zeros({MOST_FRAME_NBYTES // 8 + 1})\ndef look(x):\n    part = x[1:]\n    1 / 0")
    failed_ns(keeping, "if rank == 0: look(big)")
    assert 0 < keeping.statistics().frames_nbytes < MIB
    failed = failed_ns(keeping, f"if rank == 0: fail({MOST_FRAME_NBYTES // 8 + 1})")
    assert keeping.statistics().frames_nbytes == 0
    assert "its frames held 257" in refusal(keeping, failed)
    with pytest.raises(ParallelError, match="dead"):
        keeping.run("if nbp.alive() is None: raise ValueError('dead')", ranks=[0])


def test_frames_of_many_small_objects_count(keeping: Session) -> None:
    """Also those that are not looked at one by one."""
    objects = MOST_FRAME_NBYTES // 32
    failed = failed_ns(keeping, f"def f():\n    rows = [{{}}] * 9 + [None] * {objects}\n    1 / 0\nf()")
    assert "its frames held" in refusal(keeping, failed)


def test_only_a_notebook_has_them_kept(two_ranks: Session) -> None:
    """A script has no ``%debug``: there the frames are gone when the cell has ended."""
    two_ranks.run(FAILS)
    failed = failed_ns(two_ranks, f"if rank == 0: fail({MIB})")
    assert two_ranks.statistics().frames_nbytes == 0
    assert two_ranks.run("nbp.alive() is None", ranks=[0]).values[0]
    assert "its frames are not there" in refusal(two_ranks, failed)


def test_the_end_of_a_terminals_input_ends_it(keeping: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-D leaves the debugger, as it leaves Python's own."""
    failed = failed_ns(keeping, "1 / 0")

    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    keeping.perform(debug_task(failed), ranks=(0,))


def test_another_thread_ends_the_debugger(keeping: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Session.interrupt()`` reaches a rank whose user is asked."""
    failed = failed_ns(keeping, "1 / 0")

    def slow(prompt: str) -> str:
        threading.Thread(target=keeping.interrupt).start()
        time.sleep(30)
        return prompt

    monkeypatch.setattr("builtins.input", slow)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        keeping.perform(debug_task(failed), ranks=(0,))
    assert time.monotonic() - began < 20
