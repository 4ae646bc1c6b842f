"""What a rank has in common with the notebook's process, and what it gets a share of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbparallel.session import Session
from nbparallel.session.processes.launch import usable_cpus


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_directory_and_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_method: str) -> None:
    """The notebook's directory; equal hashes of strings on all ranks, and in what they start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with Session(2, start_method=start_method) as session:
        assert session.run("import os; os.getcwd()").values == [str(tmp_path)] * 2
        first, second = session.run("hash('a') ^ hash('b')").values
        assert first == second
        assert len(set(session.run("os.environ['PYTHONHASHSEED']").values)) == 1
        begun = "import subprocess, sys; code = 'print(hash(\\'a\\') ^ hash(\\'b\\'))'\n"
        began = session.run(begun + "int(subprocess.check_output([sys.executable, '-S', '-c', code]))").values
        assert began == [first] * 2
        session.restart(1)  # a process of its own time
        assert session.run("hash('a') ^ hash('b')").values == [first] * 2


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies are Linux's")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_the_supervisor_stands_back_for_ranks(start_method: str) -> None:
    """What wakes it is not preempted by it; ranks, started and restarted, have the user's own policy."""
    with Session(2, start_method=start_method) as session:
        session.start()
        seen = session.statistics()
        assert os.sched_getscheduler(seen.supervisor_pid) == os.SCHED_BATCH
        template = [seen.template_pid] if seen.template_pid else []
        for pid in [*template, *(rank.pid for rank in seen.ranks)]:
            assert os.sched_getscheduler(pid) == os.SCHED_OTHER
        session.restart(1)
        assert session.run("import os; os.sched_getscheduler(0)").values == [os.SCHED_OTHER] * 2


needs_two_cpus = pytest.mark.skipif(usable_cpus() < 2, reason="one CPU: a share of it is all of it")
LIBRARIES = """
import os, threadpoolctl
{pool['filepath']: pool['num_threads'] for pool in threadpoolctl.threadpool_info()}
"""


@needs_two_cpus
@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_threads_of_libraries(monkeypatch: pytest.MonkeyPatch, start_method: str) -> None:
    """A rank's share of the CPUs holds for BLAS that is there and for what a cell loads; resized too."""
    pytest.importorskip("scipy.linalg", reason="scipy brings a BLAS of its own")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with Session(1, start_method=start_method) as session:
        assert set(session.run(LIBRARIES).values[0].values()) == {usable_cpus()}
        session.resize(2)
        for counts in session.run("import scipy.linalg" + LIBRARIES).values:
            assert (len(counts), set(counts.values())) == (2, {usable_cpus() // 2})
        variables = (
            "[os.environ[name] for name in ('OMP_NUM_THREADS', 'NUMBA_NUM_THREADS', 'POLARS_MAX_THREADS')]"
        )
        assert session.run(variables).values == [[str(usable_cpus() // 2)] * 3] * 2
        session.resize(1)
        assert set(session.run(LIBRARIES).values[0].values()) == {usable_cpus()}


@pytest.mark.slow
@needs_two_cpus
def test_threads_that_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the notebook counts for every library that reads it; a number that a cell set stays."""
    pytest.importorskip("scipy.linalg", reason="scipy brings a BLAS of its own")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Session(1) as session:
        counts = session.run("import scipy.linalg" + LIBRARIES).values[0]
        assert (len(counts), set(counts.values())) == (2, {1})
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
        monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
        session.restart()
        assert set(session.run(LIBRARIES).values[0].values()) == {2}
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")
        session.restart()
        assert set(session.run(LIBRARIES).values[0].values()) == {1}
        session.run("limits = threadpoolctl.threadpool_limits(3)")
        session.resize(2)
        assert set(session.run(LIBRARIES).values[0].values()) == {3}


@pytest.mark.slow
@needs_two_cpus
def test_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's torch uses its share of the CPUs, another one after a resize, or what a cell chose."""
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    threads = "import torch; torch.get_num_threads()"
    with Session(2) as session:
        shared = usable_cpus() // 2
        assert session.run(threads).values == [shared] * 2
        session.restart(1)
        assert session.run(threads).values == [shared] * 2
        session.resize(1)
        assert session.run(threads).values == [2 * shared]
        draws = [session.run("torch.rand(3).tolist()", seed=7).values[0] for _ in range(2)]
        assert draws[0] == draws[1], "the seed of a cell counts for torch"
        session.run("torch.set_num_threads(3)")
        session.resize(2)
        assert session.run(threads).values == [3, shared]


@pytest.mark.slow
def test_ranks_follow_the_notebooks_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next cell; a rank that a cell sent elsewhere stays there until the notebook moves."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    monkeypatch.chdir(first)
    where = "import os; os.getcwd()"
    with Session(2) as session:
        session.start()
        monkeypatch.chdir(second)
        assert session.run(where).values == [str(second)] * 2
        session.run("os.chdir('/')", ranks=[1])
        result = session.run(where)
        assert (result.values, result.notes) == ([str(second), "/"], ())
        monkeypatch.chdir(third)
        result = session.run(where, ranks=[1])
        assert result.values[1] == str(third)
        assert result.notes == (f"the working directory is the notebook's again: {third}",)
        monkeypatch.chdir(first)
        third.rmdir()
        assert session.call(os.getcwd) == [str(first)] * 2, (
            "functions as well, and rank 0 went past the third"
        )
        monkeypatch.chdir(second)
        (tmp_path / "second").rename(tmp_path / "other")
        assert session.run(where).values == [str(tmp_path / "other")] * 2


@pytest.mark.slow
def test_ranks_follow_the_notebooks_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module from a folder that the notebook added later is found; what a cell added itself stays."""
    for name in ("early", "late"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"nbp_test_{name}.py").write_text(f"word = {name!r}\n")
    with Session(2) as session:
        session.run(f"import sys; sys.path.insert(0, {str(tmp_path / 'early')!r})", ranks=[1])
        monkeypatch.syspath_prepend(str(tmp_path / "late"))
        assert session.run("import nbp_test_late; nbp_test_late.word").values == ["late"] * 2
        assert session.run("import nbp_test_early; nbp_test_early.word", ranks=[1]).values[1] == "early"
        monkeypatch.undo()
        left = session.run(f"[p for p in sys.path if p.startswith({str(tmp_path)!r})]", ranks=[1])
        assert left.values[1] == [str(tmp_path / "early")]


@pytest.mark.slow
def test_a_directory_that_a_rank_cannot_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays where it is, its cell runs, and one line says why."""
    with Session(1) as session:
        before = session.run("import os; os.getcwd()").values[0]
        monkeypatch.setattr("os.getcwd", lambda: str(tmp_path / "nowhere"))
        result = session.run("os.getcwd()")
        assert result.values == [before]
        assert "the notebook's directory cannot be entered" in result.ranks[0].stderr


@pytest.mark.slow
def test_a_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks stay in it, as the notebook does: what they write by relative names must not land elsewhere."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with Session(1) as session:
        session.start()
        here.rmdir()
        where = "import os; os.path.samestat(os.stat('.'), os.stat('/'))"
        result = session.run(where)
        assert (result.values, result.notes) == ([False], ())
        monkeypatch.chdir(tmp_path)
        assert session.run("os.getcwd()").values == [str(tmp_path)]
