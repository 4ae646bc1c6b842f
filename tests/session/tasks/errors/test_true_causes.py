"""What code on a rank breaks for the rank itself: the error names that, and the rank goes on where it can."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbparallel
from nbparallel.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    ParallelError,
    RemoteError,
)
from nbparallel.session import Session
from nbparallel.testing.waiting import wait_until
from tests.harness.ranks import rank_pool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Session]:
    """Two ranks for all tests."""
    with Session(2) as session:
        session.run("1")  # the first one maps the control segment
        yield session


@pytest.fixture
def session(ranks: Session) -> Iterator[Session]:
    """Give the same ranks, which still have their variables and their processes after the test."""
    ranks.run("kept = rank + 5")
    before = [rank.pid for rank in ranks.statistics().ranks]
    yield ranks
    assert list(ranks.run("all_reduce(kept)").values) == [11, 11]
    assert [rank.pid for rank in ranks.statistics().ranks] == before


def error_of(session: Session, cell: str, rank: int = 1) -> Exception:
    """Return the error of one rank in a cell that fails."""
    with pytest.raises(ParallelError) as caught:
        session.run(cell)
    return caught.value.errors[rank]


@pytest.mark.slow
def test_a_cell_that_breaks_its_interpreter_hangs_nothing() -> None:
    """A rank that lacks builtin functions fails or ends, which releases the other; it comes back."""
    with Session(2) as session:
        session.run("1")
        for damage in ("builtins.isinstance = None", "sys.setrecursionlimit(60)", "os.close(1)"):
            with contextlib.suppress(ParallelError):
                session.run(f"import builtins, os, sys\nif rank: {damage}\nprint(len([]))\nbarrier()")
            session.restart(1)
            assert list(session.run("all_reduce(isinstance(1, int))").values) == [2, 2]


def test_a_recursion_without_end_stays_what_it_is(session: Session) -> None:
    """With a limit that is high enough; and not all modules are looked at for each of its frames."""
    session.run("import inspect\nplain, seen = inspect.ismodule, []")
    cell = "inspect.ismodule = lambda it: seen.append(it) or plain(it)\ndef f(): return f()\nf()"
    assert isinstance(error_of(session, cell), RecursionError)
    assert max(session.run("inspect.ismodule = plain\nlen(seen)").values) < 100_000


def test_an_error_where_the_directory_is_gone(session: Session) -> None:
    """The exception is whole, though no path can be made absolute."""
    session.run("import os, tempfile; here, at = os.getcwd(), tempfile.mkdtemp(); os.chdir(at); os.rmdir(at)")
    assert isinstance(error_of(session, "1 / 0"), ZeroDivisionError)
    session.run("os.chdir(here)")


def test_a_keyboard_interrupt_of_its_own(session: Session) -> None:
    """It is an error of that rank, with the reason that no interrupt came; others are released by it."""
    with pytest.raises(ParallelError) as caught:
        session.run("if rank:\n    raise KeyboardInterrupt\nbarrier()")
    error = caught.value
    assert str(error).startswith("KeyboardInterrupt on rank 1, line 2: (raised by this rank's own code")
    assert isinstance(error.errors[1], RemoteError)
    assert error.errors[1].ename == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in str(error.errors[0])
    assert "interrupted, since" not in "".join(error.rendering)


def test_a_misspelt_operation_is_suggested(session: Session) -> None:
    """As an attribute of `dist` and `nbp`, and as a name of the rank."""
    for call in ("dist.all_reduse(1)", "all_reduse(1)"):
        assert "did you mean 'all_reduce'" in str(error_of(session, call))
    assert str(error_of(session, "lock")).endswith("; did you mean `dist.lock`?")
    assert "did you mean 'share'" in str(error_of(session, "nbp.shara"))
    assert "did you mean" not in str(error_of(session, "own_name"))
    with pytest.raises(AttributeError, match="did you mean 'Session'"):
        _ = nbparallel.Sesion


def test_tracebacks_hold_no_frame_of_ours(session: Session) -> None:
    """Neither at the end nor in the middle, nor in what caused the error or is a part of its group."""
    cell = """class Odd:
    def __reduce__(self): raise ZeroDivisionError
try:
    all_reduce(object())
except TypeError as cause:
    try:
        raise RuntimeError from cause
    except RuntimeError as again:
        raise ExceptionGroup("both", [again])
"""
    with pytest.raises(ParallelError) as caught:
        session.run(cell)
    shown = "".join(caught.value.rendering)
    assert "line 4" in shown
    assert str(Path(nbparallel.__file__).parent) not in shown
    for line in traceback.format_exception(caught.value.errors[0]):
        assert "/nbparallel/" not in line.partition("RankTraceback")[0] or "tests" in line


def test_errors_in_a_group_are_named(session: Session) -> None:
    """With their lines, for each rank; a rank whose tasks were only released did not fail."""
    task = """import asyncio
async def task():
    if rank in failing: raise ValueError(f"too small on {rank}")
    barrier()
async with asyncio.TaskGroup() as group:
    group.create_task(task())
"""
    with pytest.raises(ParallelError, match="on ranks 0-1") as caught:
        session.run(f"failing = 0, 1\n{task}")
    shown = "".join(caught.value.rendering)
    for rank in (0, 1):
        assert f"ValueError: too small on {rank} (line 4 of " in shown
        assert isinstance(caught.value.errors[rank], ExceptionGroup)
    with pytest.raises(ParallelError, match=r"on rank 1, .*rank 0 was released"):
        session.run(f"failing = 1,\n{task}")
    many = error_of(session, "raise ExceptionGroup('many', [KeyError(n) for n in range(12)])", 0)
    assert len(many.exceptions) == 12


def test_causes_and_notes_of_each_rank_are_shown(two_ranks: Session) -> None:
    """One traceback for ranks that failed in the same way says of each what it was."""
    with pytest.raises(ParallelError, match="could not load") as caught:
        two_ranks.run("try: open(f'/no/{rank}')\nexcept OSError as e: raise KeyError('could not load')")
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(caught.value.rendering))
    for rank in (0, 1):
        assert f"rank {rank}: FileNotFoundError: [Errno 2] No such file or directory: '/no/{rank}'" in shown
    assert shown.count("----> 1 try") == shown.count("KeyError: 'could not load'") == 1
    with pytest.raises(ParallelError, match="on rank 0; the others' texts differ") as caught:
        two_ranks.run("e = ValueError('bad row')\ne.add_note('same')\ne.add_note(f'row {rank}')\nraise e")
    shown = "\n".join(caught.value.rendering)
    assert "rank 0: ValueError: bad row\nsame\nrow 0\nrank 1: ValueError: bad row\nsame\nrow 1\n" in shown
    assert shown.count("bad row\n") == 2


NOT_ITS_END = {
    "a value's text": ("class Odd:\n    def __repr__(self): return 1 / 0\nOdd()", "ZeroDivisionError"),
    "a display's": ("class Odd:\n    def _repr_html_(self): return 1 / 0\nOdd()", "ZeroDivisionError"),
    "a file": ("%run {path}", "ZeroDivisionError"),
    "a captured cell": ("%%capture captured\n1 / 0", "ZeroDivisionError"),
    "its syntax": ("%%capture captured\n1 / / 0", "SyntaxError"),
}


@pytest.mark.parametrize("how", NOT_ITS_END)
def test_an_error_that_does_not_end_the_cell_is_shown(how: str, tmp_path: Path, session: Session) -> None:
    """As in the notebook, where IPython shows it and goes on."""
    path = tmp_path / "script.py"
    path.write_text("1 / 0\n")
    cell, name = NOT_ITS_END[how]
    result = session.run(cell.format(path=path))
    assert name in result.ranks[1].stderr
    assert str(Path(nbparallel.__file__).parent) not in result.ranks[1].stderr


@pytest.mark.filterwarnings("default")  # ranks have those of this process, which are errors
def test_numpys_warnings_name_the_line_that_calls(session: Session) -> None:
    """In a cell, once for each of its lines; in a function of a module, the module's line."""
    cell = (
        "import numpy as np\nfor _ in range(3):\n    x = np.full(3, 1e308)\n    all_reduce(x)\nall_reduce(x)"
    )
    for _ in range(2):
        said = session.run(cell)[0].stderr
        assert [line.partition(" #")[0] for line in said.splitlines() if "Warning" in line] == [
            line.partition(" #")[0] for line in said.splitlines() if "overflow encountered in add" in line
        ]
        assert re.findall(r"In\[\d+\]:(\d+): RuntimeWarning", said) == ["4"], said
    assert "numpy.float64" not in session.run("all_reduce(np.float64(1e308))")[0].stderr
    assert ":1: RuntimeWarning: overflow" in session.run("all_reduce(np.float64(1e308))")[0].stderr
    ignored = "import warnings\nwith warnings.catch_warnings(record=True) as seen:\n"
    ignored += (
        "    warnings.simplefilter('always')\n    all_reduce(np.full(3, 1e308))\n[w.lineno for w in seen]"
    )
    assert list(session.run(ignored).values) == [[4], [4]]


@pytest.mark.filterwarnings("default")  # ranks have those of this process, which are errors
def test_functions_of_modules_have_their_file_and_line(tmp_path: Path, session: Session) -> None:
    """Where no cell runs: in time-outs, deadlocks, works that were not waited for, and warnings."""
    (tmp_path / "nbp_steps.py").write_text(
        "import numpy as np\nimport nbparallel.distributed as dist\n\ndef late():\n"
        "    if dist.get_rank():\n        dist.barrier(timeout=0.2)\n\ndef alone():\n"
        "    if dist.get_rank():\n        dist.recv(src=0)\n\ndef forgotten():\n"
        "    dist.send(1, dst=dist.get_rank())\n    dist.irecv(src=dist.get_rank())\n"
        "    dist.all_reduce(np.full(2, 1e308))\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        steps: Any = __import__("nbp_steps")
        session.run("1")
        for function, line in ((steps.late, 6), (steps.alone, 10)):
            with pytest.raises(ParallelError) as caught:
                session.call(function)
            error = caught.value.errors[1]
            if isinstance(error, CollectiveTimeoutError | DeadlockError):
                assert f"on line {line} of nbp_steps.py" in str(error), error
        said = capture(session, steps.forgotten)
        assert "irecv(src=0) on line 14 of nbp_steps.py was not waited for" in said
        assert f"{tmp_path}/nbp_steps.py:15: RuntimeWarning: overflow" in said
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("nbp_steps", None)


@pytest.mark.slow
def test_each_line_of_a_module_is_named_with_its_file(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tables of calls, deadlocks in collectives and for locks, peers' errors and unreceived messages."""
    (tmp_path / "nbp_paths.py").write_text(
        "import numpy as np\nimport nbparallel.distributed as dist\n\ndef different():\n"
        "    dist.barrier() if dist.get_rank() else dist.all_reduce(\n        1)\n\ndef crossed():\n"
        "    dist.recv(src=1) if dist.get_rank() == 0 else dist.barrier()\n\ndef held():\n"
        "    if dist.get_rank() == 0:\n        dist.lock('a').acquire()\n"
        "        dist.barrier() or dist.recv(src=1)\n"
        "    else:\n        dist.barrier() or dist.lock('a').acquire()\n\n"
        "def misfit():\n    dist.send(1, 1)\n"
        "    dist.recv(np.ones(2), src=0)\n\ndef failing():\n    1 / (1 - dist.get_rank())\n"
        "    dist.barrier()\n\ndef left():\n    dist.isend(1, 1)\n\ndef skipped():\n"
        "    if dist.get_rank():\n        dist.all_gather(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    steps: Any = __import__("nbp_paths")
    for function, expected in (
        (steps.different, (r"all_reduce .* 5 of nbp_paths\.py +1\n", r"barrier .* 5 of nbp_paths\.py +1$")),
        (steps.crossed, (r"recv\(src=1\).*\(line 9 of nbp_paths\.py\)", r"barrier.*9 of nbp_paths\.py\)")),
        (steps.held, (r"line 16 of nbp_paths\.py\), which rank 0 holds since line 13 of nbp_paths\.py",)),
        (steps.misfit, (r"send .* 19 of nbp_paths\.py", r"recv .* 20 of nbp_paths\.py")),
        (steps.skipped, (r"all_gather .* 31 of nbp_paths\.py",)),
    ):
        with pytest.raises(ParallelError) as caught:
            session.call(function)
        said = "\n".join(map(str, [caught.value, *caught.value.errors.values()]))
        for pattern in (*expected, r"on ranks? \S+, lines? [\d, ]+ of nbp_paths\.py:"):
            assert re.search(pattern, said, re.M), said
    with pytest.raises(ParallelError) as caught:
        session.call(steps.failing)
    released = "".join(map(str, caught.value.errors.values()))
    assert "ZeroDivisionError on line 23 of nbp_paths.py: division by zero" in released
    assert "rank 0 to rank 1, rank 1 to rank 1 (line 27 of nbp_paths.py, tag 0)" in capture(
        session, steps.left
    )
    monkeypatch.delitem(sys.modules, "nbp_paths")


def capture(session: Session, function: Any) -> str:
    """Return what a call wrote to stderr on rank 0."""
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as said:
        session.call(function)
    return said.getvalue()


@pytest.mark.slow
def test_an_error_says_that_the_rank_was_started_again() -> None:
    """Where nothing shows the cell's notes, as in a script: its variables are gone, and that is why."""
    with Session(2) as session:
        session.run("kept = rank")
        os.kill(session.statistics().ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: rank_pool(session).dead(), "the death of rank 1")
        with pytest.raises(ParallelError, match="NameError on rank 1") as caught:
            session.run("kept")
        assert [note for note in caught.value.__notes__ if "rank 1 was killed" in note], caught.value


@pytest.mark.parametrize("call", ["send(rank, to=1)", "broadcast(1, root=0)", "dist.grid()"])
def test_wrong_arguments_are_those_of_the_name_that_was_called(session: Session, call: str) -> None:
    """No class of the library stands before it."""
    operation = call.removeprefix("dist.").partition("(")[0]
    assert str(error_of(session, call)).startswith(f"{operation}() ")


def test_a_class_names_the_line_of_its_fault(session: Session) -> None:
    """Its body runs where it stands: not the line of ``class``; a call in it is a call."""
    with pytest.raises(ParallelError, match=r"on ranks 0-\d, line 4: division") as caught:
        session.run("x = 1\nclass A:\n    class B:\n        y = 1 / 0")
    assert [frame.function for frame in caught.value.failures[0].frames] == ["<module>"]
    with pytest.raises(ParallelError, match=r"on ranks 0-\d, line 4: division"):
        session.run("def f():\n    1 / 0\nclass A:\n    y = f()")


def test_lines_above_the_cell_are_not_shown(session: Session) -> None:
    """What stands for the notebook's ``%%parallel`` line is no code that somebody typed."""
    for source, offset in (("1 / 0", 1), ("# %%parallel\n1 / 0", 2), ("def f(): 1 / 0\nf()", 3)):
        with pytest.raises(ParallelError) as caught:
            session.run(source, line_offset=offset)
        shown = str(caught.value.errors[0].__cause__)
        assert shown.count("# %%parallel") == source.count("# %%parallel")
        assert f"line {offset + 1 + source.count(chr(10))}" in str(caught.value)
