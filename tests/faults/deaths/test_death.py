"""Ranks and supervisors that die: who hears of it, when, and what stays."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from nbparallel.errors import ParallelError, PeerFailedError, RankDiedError, StartError, SupervisorDiedError
from nbparallel.session import Session
from nbparallel.session.tasks.task_run import GRACE_SECONDS
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.messages import Configure
from tests.faults.deaths.test_reclaim import has_ended
from tests.harness.turns import Promised


def test_f1_a_rank_killed_while_idle_is_seen_at_once_and_comes_back(promised: Promised) -> None:
    """The status says so; the next cell names the signal, brings it back, and others keep variables."""
    with Session(3) as session:
        session.run("x = rank")
        pids = [rank.pid for rank in session.statistics().ranks]
        os.kill(pids[1], signal.SIGKILL)
        with promised(1.0):
            wait_until(lambda: session.statistics().ranks[1].state == "dead")
        result = session.run("'x' in globals()")
        assert result.values == [True, False, True]
        assert any(
            "rank 1 was killed by SIGKILL" in note and "without its variables" in note
            for note in result.notes
        )
        now = [rank.pid for rank in session.statistics().ranks]
        assert (now[0], now[2]) == (pids[0], pids[2])
        assert session.run("all_reduce(rank)").values == [3, 3, 3]


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
def test_f2_a_rank_killed_while_it_computes(delay: float, promised: Promised) -> None:
    """The cell ends with who, which signal and which process; ranks that compute are freed after a grace."""
    with Session(3) as session:
        pid = session.statistics().ranks[2].pid
        with promised(GRACE_SECONDS + 1.0 + delay), pytest.raises(ParallelError) as caught:
            session.run(
                "import os, signal, threading, time\n"
                "if rank == 2:\n"
                f"    threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
                "while True:\n"
                "    time.sleep(0.01)\n"
            )
        error = caught.value.errors[2]
        assert isinstance(error, RankDiedError)
        assert (error.rank, error.pid, error.signal_name) == (2, pid, "SIGKILL")
        assert error.line in ({2, 4} if delay == 0.0 else {4})  # the killer is started on line 2
        assert f"in user code on line {error.line}" in str(error)
        assert list(caught.value.errors) == [2]
        assert "ranks 0-1 were released" in str(caught.value)
        assert session.run("rank").values == [0, 1, 2]


def test_f3_peers_of_a_killed_rank_are_freed_from_their_operation() -> None:
    """Who waits for the dead one raises PeerFailedError; the root cause comes first."""
    with Session(4) as session:
        session.run("x = rank")
        with pytest.raises(ParallelError) as caught:
            session.run(
                "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nall_reduce(rank)"
            )
        errors = caught.value.errors
        assert next(iter(errors)) == 1
        assert isinstance(errors[1], RankDiedError)
        assert all(isinstance(errors[rank], PeerFailedError) for rank in (0, 2, 3))
        assert session.run("globals().get('x')").values == [0, None, 2, 3]


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize(
    ("name", "source", "signal_name"),
    [
        ("segv", "import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("abort", "import os; os.abort()", "SIGABRT"),
        ("fpe", "import os, signal; os.kill(os.getpid(), signal.SIGFPE)", "SIGFPE"),
    ],
)
def test_f5_a_crash_in_c_shows_its_signal_and_the_python_stack(
    name: str, source: str, signal_name: str
) -> None:
    """Faulthandler's last words come through the pipe although the process is dead."""
    with Session(2) as session:
        with pytest.raises(ParallelError) as caught:
            session.run(f"if rank == 1:\n    {source}")
        error = caught.value.errors[1]
        assert isinstance(error, RankDiedError)
        assert error.signal_name == signal_name
        assert error.line == 2
        assert "most recent call first" in error.stderr
        assert "File of the cell, line 2 in <module>" in error.stderr
        assert "interactiveshell" not in error.stderr
        assert session.run("rank").values == [0, 1]


@pytest.mark.slow
def test_f5_a_write_past_numpy_to_what_ranks_may_only_read_is_explained() -> None:
    """The rank that does it (as torch would, after `from_numpy`) is ended; the array stays what it was."""
    names = {"x": np.arange(100_000.0)}
    with Session(2) as session:
        with pytest.raises(ParallelError) as caught:
            session.run(
                "import ctypes\nif rank == 1:\n    ctypes.memset(x.ctypes.data, 1, 8)", namespace=names
            )
        assert "torch after from_numpy, and np.add.at do: copy the array first" in str(caught.value.errors[1])
        assert session.run("float(x[0])", namespace=names).values == [0.0, 0.0]
    assert names["x"][0] == 0


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("code", [0, 3])
def test_f7_exit_behind_our_back_is_a_death_whatever_the_code(code: int) -> None:
    """os._exit(0) is no success."""
    with Session(2) as session:
        with pytest.raises(ParallelError) as caught:
            session.run(f"import os\nif rank == 0: os._exit({code})")
        error = caught.value.errors[0]
        assert isinstance(error, RankDiedError)
        assert (error.exit_code, error.signal_name) == (code, None)
        assert session.run("rank").values == [0, 1]


class Deadly(Configure):
    """Kills the rank that receives it."""

    def __reduce__(self) -> tuple[object, ...]:
        return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)


@pytest.mark.slow
def test_f8_a_rank_that_dies_while_it_starts_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start fails at once with the reason; nothing of the group is left."""
    monkeypatch.setattr(
        "nbparallel.session.processes.rank_pool.Configure",
        lambda **known: (Deadly if known["rank"] == 1 else Configure)(**known),
    )
    session = Session(3)
    with pytest.raises(StartError, match=r"rank 1 ended while it started \(SIGKILL\)"):
        session.start()
    monkeypatch.undo()
    with session:
        assert session.run("rank").values == [0, 1, 2]


def test_f8_a_template_that_cannot_start_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python printed is in the error."""
    monkeypatch.setattr("sys.path", ["/nowhere"])
    with pytest.raises(StartError, match=r"numpy|IPython|ModuleNotFoundError"):
        Session(2).start()


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("state", ["idle", "computing", "waiting"])
def test_f9_a_killed_supervisor_takes_all_ranks_and_the_next_cell_starts_new_ones(
    state: str, promised: Promised
) -> None:
    """The cell raises, no process is left, and the session goes on with fresh ranks."""
    with Session(2) as session:
        session.run("import os, signal, time")
        supervisor = session.statistics().supervisor_pid
        pids = [rank.pid for rank in session.statistics().ranks]
        if state == "idle":
            os.kill(supervisor, signal.SIGKILL)
            with promised(1.0):
                wait_until(lambda: all(map(has_ended, pids)))
        else:
            source = "time.sleep(60)" if state == "computing" else "recv(src=0)"
            with pytest.raises((SupervisorDiedError, ParallelError)):
                session.run(f"if rank == 0: os.kill({supervisor}, signal.SIGKILL); time.sleep(60)\n{source}")
            wait_until(lambda: all(map(has_ended, pids)))
        result = session.run("rank")
        assert result.values == [0, 1]
        assert any("supervisor" in note for note in result.notes) or state != "idle"


@pytest.mark.slow
def test_f9_what_ranks_had_started_goes_with_them_when_the_supervisor_is_killed() -> None:
    """A child process of a rank, even in a session of its own, does not outlive the group."""
    with Session(1) as session:
        pid = session.run(
            "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True).pid"
        ).values[0]
        rank = session.statistics().ranks[0].pid
        os.kill(session.statistics().supervisor_pid, signal.SIGKILL)
        wait_until(lambda: has_ended(rank))
        wait_until(lambda: session.run("rank").values == [0])
        wait_until(lambda: has_ended(pid))


@pytest.mark.slow
def test_a_killed_template_hurts_nobody() -> None:
    """Ranks live on, and a rank that dies later comes back from a new template."""
    with Session(2) as session:
        session.run("x = rank")
        os.kill(session.statistics().template_pid, signal.SIGKILL)
        os.kill(session.statistics().ranks[0].pid, signal.SIGKILL)
        wait_until(lambda: session.statistics().ranks[0].state == "dead")
        assert session.run("globals().get('x')").values == [None, 1]
        os.kill(session.statistics().template_pid, signal.SIGKILL)
        session.resize(3)  # which asks for a fork before the supervisor knows
        assert session.run("globals().get('x')").values == [None, 1, None]
