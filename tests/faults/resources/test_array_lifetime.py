"""F49: arrays outlive who made them, the ranks, the session and the extension; nothing is used after unmap.

In a process of its own, under Python's debugging allocator and faulthandler.
"""

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPTS = {
    "the rank that made it is killed": """
        import os, select, signal
        with nbp.Session(2) as session:
            session.run("mine = nbp.full(100_000, rank + 1.0); small = nbp.full(10, rank)")
            values = session.run("[mine, mine[::-2], small]").values
            pidfd = os.pidfd_open(session.statistics().ranks[1].pid)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], 10)
            os.close(pidfd)
            use(*values[1], *values[0])
            assert session.run("rank, 'mine' in globals()").values == [(0, True), (1, False)]
            use(*values[1], *values[0])
            session.restart()
            use(*values[1], *values[0])
        use(*values[1], *values[0])
    """,
    "the session is stopped": """
        for method in ("forkserver", "spawn"):
            session = nbp.Session(2, start_method=method)
            names = {"x": np.arange(100_000.0), "y": nbp.zeros(10), "z": nbp.share(np.ones((500, 500)).T)}
            theirs = session.run("y[rank] = 1\\nmine = nbp.ones(100_000)\\n[mine]", namespace=names).values
            views = [names["x"][::-3], memoryview(names["y"]), np.frombuffer(memoryview(theirs[0][0])[5:])]
            session.stop()
            use(names["x"], names["y"], names["z"], *map(np.asarray, views), theirs[1][0])
            later = nbp.Session(2)
            again = later.run("float(x[0] + y[0] + z[0, 0])", namespace=names).values
            later.stop()
            assert len(set(again)) == 1, again
            use(names["x"], names["y"], names["z"], *map(np.asarray, views), theirs[1][0])
    """,
    "the supervisor is killed": """
        import os, signal, psutil
        session = nbp.Session(2)
        names = {"x": nbp.zeros(100_000)}
        theirs = session.run("mine = nbp.ones(100_000)\\n[mine, x[1:]]", namespace=names).values
        (supervisor,) = psutil.Process().children()
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait(10)
        use(names["x"], *theirs[0], *theirs[1])
        assert session.run("float(x[0])", namespace=names).values == [names["x"][0]] * 2
        use(names["x"], *theirs[0], *theirs[1])
        session.stop()
        use(names["x"], *theirs[0], *theirs[1])
    """,
    "the extension is unloaded": """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "nbparallel")
        shell.user_ns["np"], shell.user_ns["nbp"] = np, nbp
        shell.run_cell("x = np.arange(100_000.0); y = nbp.zeros(3); v = x[::-2]")
        shell.run_cell("%%parallel -n 2 -o parts\\ny[rank] = x.sum()\\nmine = nbp.ones(100_000)\\n[mine]")
        held = [shell.user_ns[name] for name in "xyv"] + [part[0] for part in shell.user_ns["parts"]]
        assert len(held) == 5
        for line in ("%parallel_stop", "%unload_ext nbparallel", "%load_ext nbparallel"):
            shell.run_cell(line)
            use(*held)
        shell.run_cell("%%parallel -n 2 -o again\\nfloat(y[0])")
        assert list(shell.user_ns["again"]) == [shell.user_ns["y"][0]] * 2
        shell.run_cell("%unload_ext nbparallel")
        use(*held)
    """,
}

USE = """
import gc
import numpy as np
import nbparallel as nbp


def use(*arrays):
    gc.collect()
    nbp.sharing.current_store().drain()
    nbp.sharing.current_store().trim()
    for array in arrays:
        array.sum(), array.copy()
        if array.flags.writeable:
            array.flat[0] += 1
            array.flat[-1] += 1
"""


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(90)
@pytest.mark.parametrize("what", SCRIPTS)
def test_f49_arrays_outlive(what):
    """Views are read and written after their maker has gone; the process ends well, and silent."""
    environment = {**os.environ, "PYTHONMALLOC": "debug", "PYTHONFAULTHANDLER": "1", "PYTHONDEVMODE": ""}
    code = f"{USE}\n{textwrap.dedent(SCRIPTS[what])}\nprint('fine')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "fine"
