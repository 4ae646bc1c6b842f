"""F66, F69, F75: user code or an installation changes what lies under our feet."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nbparallel
from nbparallel.errors import StartError
from nbparallel.session import Session
from tests.harness.stores import names_of

CHANGES = {
    "the directory": "os.chdir('/')",
    "a directory that goes": "import tempfile\nos.chdir(tempfile.mkdtemp())\nos.rmdir(os.getcwd())",
    "the umask": "os.umask(0)",
    "the environment": "os.environ.clear()",
    "the search path": "import sys\nsys.path.clear()",
    "the limit of open files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "signal handlers": "import signal\nfor n in (2, 15, 17): signal.signal(n, signal.SIG_IGN)",
}


@pytest.mark.time_limit(60)
def test_f66_what_a_cell_changes_on_a_rank_does_no_harm() -> None:
    """Directory, umask, environment, path, limits, files, handlers: rank 1 still does all that it did."""
    with Session(2) as session:
        for what, change in CHANGES.items():
            session.run(f"import os\n{change}", ranks=[1])
            assert session.run("all_reduce(rank)").values == [1, 1], what
            made = "x = nbp.zeros(1 << 20, strategy='file_system'); float(all_reduce(x.sum()))"
            assert session.run(made).values == [0.0, 0.0], what
            names = names_of(os.getpid())
            assert len(names) >= 2, what
            for name in names:
                assert stat.S_IMODE(os.lstat(name).st_mode) == 0o600, what
            session.run("del x")
            if what == "signal handlers":
                assert (
                    session.run("import signal; signal.getsignal(2) != signal.SIG_IGN").values == [True] * 2
                )


@pytest.mark.slow
def test_f69_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that found another numpy than the notebook runs: nothing starts, the error says what to do."""
    here = np.__version__
    monkeypatch.setattr(np, "__version__", "1.0.1")
    session = Session(2)
    expected = rf"ranks 0-1 would run numpy {here} \(the notebook has 1.0.1\).*restart the kernel"
    with pytest.raises(StartError, match=expected):
        session.start()
    monkeypatch.undo()
    with session:
        assert session.run("rank").values == [0, 1]
        monkeypatch.setattr(nbparallel, "__version__", "0.0.1")
        with pytest.raises(StartError, match=r"rank 1 would run nbparallel .* \(the notebook has 0.0.1\)"):
            session.restart(1)
        monkeypatch.undo()
        assert session.run("rank").values == [0, 1], "and it comes back when that is over"


UNINSTALLED = """
import os, signal, sys
import numpy as np
import nbparallel as nbp
from nbparallel.errors import CollectiveMismatchError, DeadlockError, ParallelError, RankDiedError

site = os.environ["PYTHONPATH"]
assert nbp.__file__.startswith(site)

def fails(source, kind):
    try:
        session.run(source, namespace=names)
    except ParallelError as error:
        assert isinstance(error.errors[1], kind), error
    else:
        raise AssertionError(source)

names = {"data": [1, 2], "a": np.zeros(10)}
session = nbp.Session(2)
session.start()
os.rename(f"{site}/nbparallel", f"{site}/gone")
assert session.run("all_reduce(rank)").values == [1, 1]
session.run("float(a.sum()), data, nbp.share(nbp.zeros(9))", namespace=names)
session.run("g = dist.new_group([0, 1]); w = isend(rank, 1 - rank); recv(src=1 - rank); w.wait()")
session.run("gather(rank); w = irecv(src=1 - rank); send(rank, 1 - rank); w.wait()")
session.run("broadcast(1); all_gather(rank); scatter([1, 2] if rank == 0 else None); reduce_scatter(a + 0.0)")
session.run("dist.scan(1); dist.exscan(1); dist.maxloc(1); dist.grid(2); dist.lock('x').acquire()")
session.run("all_to_all([1, 2]); reduce(1, 0); barrier(); all_reduce(1, async_op=True).wait()")
fails("1 / (1 - rank)", ZeroDivisionError)
fails("barrier() if rank else all_reduce(1)", CollectiveMismatchError)
fails("recv(src=1 - rank)", DeadlockError)
fails("a[0] = 1", ValueError)
fails("import os; os._exit(3) if rank else barrier()", RankDiedError)
assert session.run("rank").values == [0, 1]
assert session.call(max, 1, 2) == [2, 2]
session.push(z=1)
assert session.pull("z") == [1, 1]
session.resize(3)
assert session.run("all_reduce(1)").values == [3] * 3
session.statistics(), session.who({}), session.complete("ran", 3)
session.stop()
try:
    nbp.Session(1).start()
except nbp.errors.StartError as error:
    assert "No module named 'nbparallel'" in str(error), error
else:
    raise AssertionError("started from nothing")
print("fine")
"""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f75_an_uninstalled_package_goes_on_while_its_group_runs(tmp_path: Path) -> None:
    """The package is moved away under a running session: everything works until it is stopped."""
    home = Path(nbparallel.__file__).parent
    shutil.copytree(home, tmp_path / "nbparallel", ignore=shutil.ignore_patterns("testing"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", UNINSTALLED],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.stdout, done.stderr) == ("fine\n", ""), done.stderr
