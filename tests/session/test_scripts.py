"""Scripts as ranks: ``nbparallel.spawn`` and ``python -m nbparallel run``."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError


@pytest.mark.slow
def test_spawn_gives_every_rank_its_number_and_the_same_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """As torch.multiprocessing.spawn: function(rank, *args); a shared array is written by all."""
    seen = nbp.zeros(3)

    def work(rank: int, out: np.ndarray, factor: int) -> None:
        out[rank] = nbp.distributed.all_reduce(rank) * factor + rank
        print(f"this is {rank}")

    assert nbp.spawn(work, args=(seen, 10), nprocs=3) is None
    assert seen.tolist() == [30, 31, 32]
    out = capfd.readouterr().out.splitlines()
    assert sorted(out) == [f"[rank {r}] this is {r}" for r in range(3)]


@pytest.mark.slow
def test_spawn_raises_what_a_rank_raised() -> None:
    """The others are freed, and nothing is left."""

    def work(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError("mine")
        nbp.distributed.barrier()

    with pytest.raises(ParallelError, match="ZeroDivisionError on rank 1") as caught:
        nbp.spawn(work, nprocs=2)
    assert isinstance(caught.value.errors[1], ZeroDivisionError)


def test_spawn_refuses_what_is_no_function() -> None:
    """Before anything is started."""
    with pytest.raises(TypeError, match="a function to call, not int"):
        nbp.spawn(3)  # type: ignore[arg-type]


SCRIPT = """\
import sys
import nbparallel.distributed as dist
from beside import double

class Point:
    def __init__(self, x):
        self.x = x

if __name__ == "__main__":
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.send(Point(double(rank)), (rank + 1) % size)
    got = dist.recv(src=(rank - 1) % size)
    assert isinstance(got, Point)
    print(sys.argv[1:], "got", got.x, end="")
    if "raise" in sys.argv and rank == 1:
        raise ValueError("as asked")
    if "exit" in sys.argv:
        sys.exit(0 if rank == 0 else 7)
    if "leave" in sys.argv and rank == 0:
        sys.exit()
    if "sleep" in sys.argv:
        import time
        print("", "asleep", flush=True)
        time.sleep(100)
    dist.barrier()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script with a module beside it."""
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def _run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbparallel", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


@pytest.mark.slow
def test_a_script_runs_as_main_on_every_rank(script: Path) -> None:
    """With its arguments, its neighbours importable, its classes the same on all ranks."""
    done = _run("--nproc", 2, script, "-a", "--nproc", "5")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] ['-a', '--nproc', '5'] got 2",
        "[rank 1] ['-a', '--nproc', '5'] got 0",
    ]
    assert done.stderr == ""


@pytest.mark.slow
def test_a_module_runs_as_with_python_m(script: Path) -> None:
    """``-m`` takes a module's name and looks where the command was given."""
    done = _run("-n", 2, "-m", "script", cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] [] got 2", "[rank 1] [] got 0"]


@pytest.mark.slow
def test_a_script_that_raises_is_shown_with_its_own_lines(script: Path) -> None:
    """The status is 1, the root cause is named, our frames are not shown."""
    done = _run("-n", 2, script, "raise")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ParallelError: ValueError on rank 1, line 17")
    assert "---> 17 " in done.stderr
    assert "engine" not in done.stderr


@pytest.mark.slow
def test_the_exit_status_is_the_scripts_own(script: Path) -> None:
    """``sys.exit(7)`` of a rank is the command's status; ``sys.exit()`` is success."""
    assert _run("-n", 2, script, "exit").returncode == 7
    left = _run("-n", 1, script, "leave")
    assert (left.returncode, left.stderr) == (0, "")


@pytest.mark.slow
def test_what_cannot_be_run_is_said_once_before_anything_starts(tmp_path: Path) -> None:
    """A missing file, a syntax error, a missing module, too many ranks."""
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ny = (\n")
    missing = _run(tmp_path / "none.py")
    assert missing.returncode == 2
    assert "No such file or directory" in missing.stderr
    syntax = _run("-n", 4, broken)
    assert syntax.returncode == 2
    assert syntax.stderr.count("SyntaxError") == 1
    assert "line 2" in syntax.stderr
    module = _run("-m", "no_such_module_here")
    assert (module.returncode, module.stderr.count("no_such_module_here")) == (2, 1)
    many = _run("-n", 100000, broken.with_name("ok.py"))
    assert many.returncode == 2
    (tmp_path / "ok.py").write_text("")
    many = _run("-n", 100000, tmp_path / "ok.py")
    assert many.returncode == 1
    assert "Traceback" not in many.stderr
    assert "100000" in many.stderr


@pytest.mark.slow
@pytest.mark.fault
def test_interrupting_the_command_ends_all_ranks(script: Path) -> None:
    """Ctrl-C, as a shell sends it: status 130, one line, nobody left (the fixture looks)."""
    command = [sys.executable, "-m", "nbparallel", "run", "-n", "2", str(script), "sleep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert len(list(itertools.islice((line for line in lines if "asleep" in line), 2))) == 2
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "nbparallel run: interrupted; all ranks have ended\n"


@pytest.mark.slow
def test_advice_in_a_script_names_no_magics() -> None:
    """Whether numpy refuses to write, or an operation."""
    x = np.zeros(40_000)
    with nbp.Session(2) as session:
        for cell in ("x[0] = 1", "all_reduce(x)", "nbp.share(x)"):
            with pytest.raises(ParallelError) as caught:
                session.run(cell, namespace={"x": x})
            said = str(caught.value.errors[0])
            assert "nbp.share(x)" in said or cell == "all_reduce(x)", said
            assert "x.copy()" in said
            assert "%" not in said
            assert "--share" not in said


@pytest.mark.slow
def test_a_name_that_only_the_script_has_is_explained(two_ranks: nbp.Session) -> None:
    """If the cell was run without a namespace; not for a name that is in none, nor in a function's module."""
    for cell in ("only_here + 1", "def f():\n    return only_here\nf()"):
        with pytest.raises(ParallelError) as caught:
            two_ranks.run(cell)
        said = str(caught.value.errors[0])
        assert said.startswith("name 'only_here' is not defined; a session's ranks do not see your")
        assert "`run(…, namespace=globals())`" in said
        assert "`push(only_here=only_here)`" in said
    for cell, known in (("nowhere", {}), ("only_here + nowhere", {"only_here": 1})):
        with pytest.raises(ParallelError) as caught:
            two_ranks.run(cell, namespace=known)
        assert str(caught.value.errors[0]) == "name 'nowhere' is not defined"
    two_ranks.push(only_here=1)
    assert list(two_ranks.run("only_here + 1").values) == [2, 2]
