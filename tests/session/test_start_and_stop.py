"""Ranks of a session: they start, grow in number, restart, are idle and end."""

from __future__ import annotations

import gc
import math
import os
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session
from nbparallel.sharing import current_store
from nbparallel.testing.processes import patience, read
from nbparallel.testing.waiting import wait_until
from tests.harness.ranks import rank_pool
from tests.multiprocessing.programs import run_program
from tests.session.names.memory.mapped_memory import mapped


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_both_start_methods_work_and_leave_nothing(method: str) -> None:
    """Start, run, stop: no process, descriptor or thread stays (the autouse check looks)."""
    with Session(2, start_method=method) as session:
        assert session.run("rank").values == [0, 1]
        assert session.statistics().start_method == method
        # Each leads a group, and none a session: else a rank that yields its processor yields it to no other.
        places = session.run("import os\nos.getsid(0), os.getpgid(0) - os.getpid()").values
        assert places == [(session.statistics().supervisor_pid, 0)] * 2
    assert session.closed
    with pytest.raises(RuntimeError, match="was stopped"):
        session.run("1")


@pytest.mark.slow
def test_growing_and_shrinking() -> None:
    """New ranks join; ranks that hold variables are not taken away."""
    with Session(2) as session:
        session.run("mine = rank")
        session.resize(4)
        assert session.run("world_size").values == [4] * 4
        session.run("mine = rank")
        with pytest.raises(ValueError, match=r"ranks 2-3 would be ended and hold variables .*mine"):
            session.resize(2)
        session.run("del mine", ranks=[2, 3])
        session.resize(2)
        assert session.run("mine + world_size").values == [2, 3]


@pytest.mark.slow
def test_what_the_notebook_can_send_again_does_not_keep_ranks() -> None:
    """A rank that has only modules and names of the notebook may go; not one that may have changed them."""

    def half(value: float) -> float:
        return value / 2

    notebook = {"x": np.arange(4.0), "scale": 3, "half": half, "math": math, "parts": [1]}
    with Session(3) as session:
        session.run("import os, numpy as np\nhalf(x[0] * scale) + math.pi + len(parts)", namespace=notebook)
        session.resize(2)
        assert session.run("x[1] * scale", namespace=notebook).values == [3.0, 3.0]
        session.run("parts.append(rank)", namespace=notebook)
        with pytest.raises(ValueError, match=r"rank 1 would be ended and holds variables \(.*: parts\)"):
            session.resize(1)
        session.run("del parts; scale = 4", namespace=notebook)
        with pytest.raises(ValueError, match=r"\(rank 1: scale\)"):
            session.resize(1)


@pytest.mark.slow
def test_a_press_after_the_end_is_no_error() -> None:
    """Ctrl-C while a start that failed is cleaned up, or `interrupt` beside `stop`, finds nobody to wake."""
    session = Session(1)
    session.start()
    pool = rank_pool(session)
    session.stop()
    pool.wake()


@pytest.mark.slow
def test_restart_of_one_rank_keeps_the_others() -> None:
    """Same number, fresh process; the others are the same processes with their variables."""
    with Session(3) as session:
        session.run("x = rank")
        before = [rank.pid for rank in session.statistics().ranks]
        session.restart(1)
        after = [rank.pid for rank in session.statistics().ranks]
        assert after[0] == before[0]
        assert after[2] == before[2]
        assert after[1] != before[1]
        assert session.run("'x' in globals()").values == [True, False, True]


@pytest.mark.parametrize(
    ("size", "kind", "text"),
    [
        (0, ValueError, "at least 1"),
        (-3, ValueError, "at least 1"),
        (10_000, ValueError, "do not fit this machine"),
        (1.5, TypeError, "integer"),
        (True, TypeError, "integer"),
    ],
)
def test_impossible_numbers_of_ranks_are_refused_with_the_reason(
    size: object, kind: type[Exception], text: str
) -> None:
    """Nothing is started for a number that cannot be."""
    with pytest.raises(kind, match=text):
        Session(size)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_idle_session_uses_no_cpu() -> None:
    """No process of a session wakes up while nothing runs."""
    import psutil

    with Session(2) as session:
        session.run("1")
        statistics = session.statistics()
        pids = [statistics.supervisor_pid, statistics.template_pid, *(rank.pid for rank in statistics.ranks)]
        processes = [psutil.Process(pid) for pid in pids]

        def activity() -> list[object]:
            return [(p.cpu_times()[:2], p.num_ctx_switches().voluntary) for p in processes]

        def calm() -> list[object] | None:
            before = activity()
            time.sleep(0.05)
            return before if activity() == before else None

        before = wait_until(calm)  # ranks tidy up for a moment after they have reported
        time.sleep(1.0)  # the subject: a second in which nothing may happen
        assert activity() == before


@pytest.mark.slow
def test_ranks_and_workers_start_below_a_debugger(tmp_path: Path) -> None:
    """JupyterLab's rewrites the command lines of children; ours start as they are, and one line says so."""
    program = """
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
import debugpy
debugpy.listen(("127.0.0.1", 0))
with nbp.Session(2) as session:
    first, second = session.run("rank"), session.run("rank")
assert first.values == second.values == [0, 1]
assert "debugger does not see ranks" in first.notes[0] and not second.notes
for method in "forkserver", "spawn":
    with mp.get_context(method).Pool(1) as pool:
        assert pool.apply_async(abs, (-1,)).get(30) == 1
"""
    run_program(program, tmp_path)


@pytest.mark.slow
def test_a_stopped_session_keeps_no_array() -> None:
    """Though the session is kept, what the notebook deletes is gone: objects, memory and names."""
    current_store().drain()
    before = mapped()
    names = {path.name for path in Path("/dev/shm").glob(f"nbp_*_{os.getpid()}*")}
    notebook = {"x": np.ones(12_500_000), "parts": [np.ones(1000)], "half": lambda value: value / 2}
    session = Session(2)
    session.run("half(x.sum()), parts", namespace=notebook)
    with pytest.raises(ParallelError):
        session.run("x, parts, 1 / 0", namespace=notebook)
    session.submit("x.sum()", namespace=notebook).result()
    session.push(parts=notebook["parts"])
    session.who(notebook)
    session.statistics(notebook)
    session.timeline()
    assert mapped() >= before + notebook["x"].nbytes
    session.stop()
    arrays = [weakref.ref(notebook["x"]), weakref.ref(notebook["parts"][0]), weakref.ref(notebook["half"])]
    notebook.clear()
    gc.collect()
    assert [array() for array in arrays] == [None] * 3
    current_store().drain()  # as the end of a notebook's cell does
    assert mapped() <= before
    assert {path.name for path in Path("/dev/shm").glob(f"nbp_*_{os.getpid()}*")} == names
    assert session.closed


@pytest.mark.slow
def test_what_script_magics_keep_ends_with_the_rank(tmp_path: Path) -> None:
    """IPython's kept thread delays no end, and a script in the background is ended with its rank."""

    def running(rank: int) -> bool:
        found = read(int((tmp_path / f"{rank}").read_text()))
        return found is not None and found.state != "Z"

    with Session(2) as session:
        threads = "import threading\nlen(threading.enumerate())"
        assert session.run(threads).values == [1, 1]
        session.run(f"import os; os.chdir({str(tmp_path)!r}); os.environ['OWN'] = str(rank)")
        session.run("%%bash --bg\necho $$ > part$OWN && mv part$OWN $OWN\nexec sleep 600")
        assert all(count > 1 for count in session.run(threads).values)
        wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        assert running(0)
        assert running(1)
        begun = time.monotonic()
        session.restart(1)
        wait_until(lambda: not running(1))
        assert running(0)
    wait_until(lambda: not running(0))
    assert time.monotonic() - begun < 10 * patience()
