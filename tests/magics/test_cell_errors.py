"""How a cell's errors read: the root cause, where each rank was, and none of our own frames."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from nbparallel.errors import CellTimeoutError, NbParallelError, StartError
from nbparallel.session.tasks import parallel_error
from nbparallel.wire.messages import Cause, FrameLine, RankFailure


def test_the_lines_above_count_as_the_gutter_does(notebook: Any) -> None:
    """Blank lines above `%%parallel` count; a `%parallel` line counts from its own line."""
    notebook.run("\n\n%%parallel\nx")
    assert notebook.session.calls[-1].line_offset == 3
    notebook.run("a = 1\n%parallel x")
    assert notebook.session.calls[-1].line_offset == 1
    notebook.run("get_ipython().run_cell_magic('parallel', '', 'x')")
    assert notebook.session.calls[-1].line_offset == 1


def failing(sink: Any, call: Any) -> None:
    """Fail on rank 2 as a session does."""
    sink.stream(0, "stdout", "before\n")
    sink.finish()
    frame = FrameLine("In[1]", 4, "<module>", "1 / 0")
    failure = RankFailure(
        2,
        1,
        "ZeroDivisionError",
        "division by zero",
        pickle.dumps(ZeroDivisionError("division by zero")),
        (),
        (frame,),
    )
    raise parallel_error.build_parallel_error({2: failure}, {0: "", 1: "", 3: ""})


def test_errors_name_the_root_cause(notebook: Any) -> None:
    """The cell's error has the root cause in its text, and its traceback is the ranks', not ours."""
    notebook.play(failing)
    out = notebook.run("%%parallel -n 4\n1 / 0")
    assert (
        str(out.error) == "ZeroDivisionError on rank 2, line 4: division by zero (ranks 0-1, 3 were released)"
    )
    shown = out.stdout
    assert shown.startswith("[rank 0] before\n[rank 2]\nCell In[1]")
    assert "Cell In[1], line 4\n    1 / 0\nZeroDivisionError: division by zero" in shown
    assert "run_cell_magic" not in shown + out.stderr
    assert "Cell In[1], line 4" in notebook.run("%parallel_tb").stdout
    for rank in (0, 3):
        out = notebook.run(f"%parallel_tb -r {rank}")
        assert out.stderr == f"UsageError: rank {rank} raised nothing; rank 2 did\n"
    assert "there is no rank 4: ranks are 0-3" in notebook.run("%parallel_tb -r 4").stderr
    assert "did you mean -r 2?" in notebook.run("%parallel_tb 2").stderr
    assert "did you mean -r 0,2?" in notebook.run("%parallel_restart 0,2").stderr


@pytest.mark.parametrize("kind", [CellTimeoutError, KeyboardInterrupt])
def test_the_traceback_after_a_stop_shows_where_each_rank_was(notebook: Any, kind: type) -> None:
    """`%parallel_tb` after a time-out or an interrupt; an interrupt before there was anything keeps it."""
    frame = FrameLine("In[1]", 3, "<module>", "time.sleep(60)")
    failure = RankFailure(1, 1, "KeyboardInterrupt", "", None, (), (frame,), Cause.INTERRUPT)

    def stopped(sink: Any, call: Any) -> None:
        error = kind("stopped")
        error.failures = {1: failure}
        raise error

    notebook.play(stopped)
    assert isinstance(notebook.run("%%parallel -n 2\ntime.sleep(60)").error, kind)
    shown = notebook.run("%parallel_tb -r 1").stdout
    assert "[rank 1]\nCell In[1], line 3\n    time.sleep(60)\nKeyboardInterrupt" in shown
    notebook.play(lambda sink, call: (_ for _ in ()).throw(KeyboardInterrupt))
    notebook.run("%parallel 1")
    assert notebook.run("%parallel_tb").stdout == shown


def test_equal_tracebacks_are_shown_once(notebook: Any) -> None:
    """`%parallel_tb` folds them as a cell's error does."""
    frames = {rank: (FrameLine("In[1]", 3 + rank // 2, "<module>", "sleep(60)"),) for rank in range(3)}

    def stopped(sink: Any, call: Any) -> None:
        error = CellTimeoutError("stopped")
        error.failures = {
            rank: RankFailure(rank, 1, "KeyboardInterrupt", "", None, (), frames[rank], Cause.INTERRUPT)
            for rank in frames
        }
        raise error

    notebook.play(stopped)
    notebook.run("%%parallel -n 3\nsleep(60)")
    shown = notebook.run("%parallel_tb").stdout
    assert [line for line in shown.splitlines() if line[:1] == "["] == ["[ranks 0-1]", "[rank 2]"]


def test_session_errors_are_shown_without_our_frames(notebook: Any) -> None:
    """An error that no rank raised is its name and text; an interrupt stays a KeyboardInterrupt."""

    def cannot_start(sink: Any, call: Any) -> None:
        raise StartError("no ranks: out of memory")

    def interrupted(sink: Any, call: Any) -> None:
        raise KeyboardInterrupt

    notebook.play(cannot_start)
    out = notebook.run("%%parallel\nx")
    assert isinstance(out.error, NbParallelError)
    assert out.stdout == "StartError: no ranks: out of memory\n"
    notebook.play(interrupted)
    out = notebook.run("%%parallel\nx")
    assert isinstance(out.error, KeyboardInterrupt)
    assert out.stdout == "KeyboardInterrupt\n"
