"""Processes that a cell starts on a rank: `multiprocessing`, `concurrent.futures`, `subprocess`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.session import Session

pytestmark = pytest.mark.time_limit(120)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module that workers can import beside the notebook, whose path ranks and workers have."""
    (tmp_path / "worker_of_test.py").write_text("def square(x):\n    return x * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools_work_on_every_rank(module: None, method: str) -> None:
    """Whatever starts the workers; they import no main program again, and the rank goes on communicating."""
    with Session(2) as session:  # whose ranks' folders go with it
        result = session.run(
            "import multiprocessing as mp, sys\nfrom worker_of_test import square\n"
            "from concurrent.futures import ProcessPoolExecutor\n"
            f"context = mp.get_context({method!r})\n"
            "with context.Pool(2) as pool:\n    squares = pool.map(square, range(5))\n"
            "with ProcessPoolExecutor(2, mp_context=context) as pool:\n"
            "    more = list(pool.map(square, [rank + 10]))\n"
            "all_reduce(sum(squares)), more"
        )
        assert result.values == [(60, [100]), (60, [121])]
        assert result.ranks[0].stdout + result.ranks[0].stderr == ""
        assert session.run("barrier(); rank").values == [0, 1]


@pytest.mark.slow
def test_the_librarys_folder_goes_with_the_rank() -> None:
    """A rank ends without exit handlers, one of which removes the folder of fork servers and managers."""
    with Session(1) as session:
        result = session.run(
            "import multiprocessing as mp, multiprocessing.util\n"
            "process = mp.get_context('forkserver').Process(target=int)\n"
            "process.start(); process.join()\n"
            "multiprocessing.util.get_temp_dir()"
        )
        (folder,) = result.values
        assert any(path.name.startswith("listener-") for path in Path(folder).iterdir())
    assert not Path(folder).exists()


@pytest.mark.slow
def test_a_forked_worker_sees_the_rank_as_it_is(two_ranks: Session) -> None:
    """Functions of the cell need no pickling; what the worker writes to a shared array is there."""
    namespace = {"x": nbp.share(np.zeros(4))}
    result = two_ranks.run(
        "import multiprocessing as mp\n"
        "def fill(i):\n    x[2 * rank + i] = 10 * rank + i + 1\n    return rank\n"
        "with mp.get_context('fork').Pool(2) as pool:\n    who = pool.map(fill, range(2))\n"
        "barrier()\nwho, list(x)",
        namespace=namespace,
    )
    assert result.values == [([0, 0], [1, 2, 11, 12]), ([1, 1], [1, 2, 11, 12])]
    assert list(namespace["x"]) == [1, 2, 11, 12]


def test_children_speak_under_their_ranks_name(two_ranks: Session) -> None:
    """A child's output is the rank's; its environment names the rank; its status and a failure come back."""
    result = two_ranks.run(
        "import subprocess, sys\n"
        "subprocess.run(['sh', '-c', 'echo child of $RANK of $WORLD_SIZE; echo oh >&2'])\n"
        "found = !echo $RANK\n"
        "code = subprocess.run([sys.executable, '-c', 'import os; os._exit(7)']).returncode\n"
        "int(subprocess.check_output([sys.executable, '-c', 'print(40 + 2)'])), code, found"
    )
    for rank in range(2):
        assert result.ranks[rank].stdout == f"child of {rank} of 2\n"
        assert result.ranks[rank].stderr == "oh\n"
    assert result.values == [(42, 7, ["0"]), (42, 7, ["1"])]


def test_the_main_guard_holds(two_ranks: Session) -> None:
    """A cell is `__main__`, as in the notebook; the notebook's own main program is not run again."""
    result = two_ranks.run(
        "import __main__, sys\nclass Mine: pass\n"
        "if __name__ == '__main__':\n    ran = True\n"
        "__name__, ran, __main__.Mine is Mine, hasattr(__main__, '__file__'), sys.argv"
    )
    assert result.values == [("__main__", True, True, False, [""])] * 2
