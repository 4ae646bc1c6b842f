"""Cells that nobody waits for yet: `Session.submit`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nbparallel.errors import BusyError, ParallelError
from nbparallel.session import PendingCell, Session
from nbparallel.testing.waiting import wait_until


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two ranks."""
    with Session(2) as session:
        session.run("pass")  # the first epoch's control segment is there before the first leak check
        yield session


def _wait_for_text(pending: PendingCell, text: str) -> None:
    wait_until(lambda: text in pending.stdout(0), pending)


@pytest.mark.slow
def test_a_submitted_cell_runs_while_its_caller_goes_on() -> None:
    """It says what was printed so far; whatever else needs the ranks is refused until it has ended."""
    with Session(2) as session:
        pending = session.submit(
            "import time\nprint('begun', flush=True)\nwhile not flag[0]:\n    time.sleep(0.01)\nrank * 10",
            namespace=(namespace := {"flag": np.zeros(1)}),
        )
        _wait_for_text(pending, "begun")
        assert (pending.state, pending.done(), pending.wait(0.01)) == ("running", False, False)
        with pytest.raises(TimeoutError, match="still runs after"):
            pending.result(0.01)
        for other in (
            lambda: session.run("1"),
            lambda: session.submit("1"),
            lambda: session.call(len, ""),
            lambda: session.pull("x"),
            session.restart,
            lambda: session.resize(3),
        ):
            with pytest.raises(BusyError, match=r"to stop it, .* cancel\(\).* session.interrupt"):
                other()
        namespace["flag"][0] = 1  # the same memory
        assert list(pending.result(30).values) == [0, 10]
        assert (pending.state, pending.done(), pending.cancel()) == ("done", True, False)
        assert pending.stdout(1) == "begun\n"
        assert list(session.run("rank").values) == [0, 1]


def test_session_interrupt_reaches_it(session: Session) -> None:
    """`Session.interrupt` means whatever runs."""
    pending = session.submit("import time\nprint('asleep', flush=True)\ntime.sleep(100)")
    _wait_for_text(pending, "asleep")
    session.interrupt()
    assert isinstance(pending.exception(30), KeyboardInterrupt)


@pytest.mark.slow
def test_its_error_is_kept_for_who_asks(session: Session) -> None:
    """Every time the same one; the ranks work on."""
    pending = session.submit("1 / rank")
    for _ in range(2):
        with pytest.raises(ParallelError, match="ZeroDivisionError on rank 0"):
            pending.result(30)
    assert pending.state == "failed"
    assert list(session.run("rank").values) == [0, 1]


def test_callbacks_are_called_once_before_or_after_the_end(session: Session) -> None:
    """With the pending cell itself."""
    heard: list[str] = []
    pending = session.submit("import time\ntime.sleep(0.2)")
    pending.add_done_callback(lambda cell: heard.append(cell.state))
    pending.result(30)
    wait_until(lambda: heard)
    pending.add_done_callback(lambda cell: heard.append("late"))
    assert heard == ["done", "late"]


def test_a_time_out_ends_it(session: Session) -> None:
    """`timeout` holds for it as for `run`."""
    pending = session.submit("import time\ntime.sleep(100)", timeout=0.2)
    assert isinstance(pending.exception(30), TimeoutError)
    assert pending.state == "failed"


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_rank_fails_it() -> None:
    """A death is its error, and the next cell works."""
    with Session(2) as session:
        pending = session.submit(
            "import os, signal\nrank == 1 and os.kill(os.getpid(), signal.SIGKILL)\nbarrier()"
        )
        with pytest.raises(ParallelError, match="rank 1"):
            pending.result(30)
        assert list(session.run("rank").values) == [0, 1]
