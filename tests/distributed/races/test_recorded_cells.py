"""Recording on real ranks: what the cell's code does in ways that numpy does not show; nothing is left."""

from __future__ import annotations

import numpy as np
import pytest

from nbparallel.distributed.runtime.call_site import label_function
from nbparallel.errors import ParallelError
from nbparallel.session import Session

pytest_plugins = ["tests.harness.sessions"]
pytestmark = pytest.mark.slow
COPY = """part = np.zeros(4)
if rank == 0:
    grid[0:4] = 1
if rank == 1:
    part[:] = grid[2:6]
"""


def test_copies_to_private_arrays_are_reads(two_ranks: Session) -> None:
    """Numpy copies without asking the array; the cell's code asks for it."""
    result = two_ranks.run(COPY, namespace={"grid": np.zeros(12), "np": np}, share=["grid"], check_races=True)
    (race,) = result.races
    assert (race.array, set(race.lines), race.certain) == ("grid", {3, 5}, True)


def test_functions_of_a_checked_cell_work_later_and_elsewhere(two_ranks: Session) -> None:
    """They call what the check has put into the code."""
    define = "def first(x):\n    out = [0, 0]\n    i = 1\n    out[i] = x[0]\n    return out"
    two_ranks.run(define, check_races=True)
    assert [list(value) for value in two_ranks.run("first([7, 8])").values] == [[0, 7], [0, 7]]
    (moved, _) = two_ranks.run("first").values
    assert list(moved([3])) == [0, 3]


@pytest.mark.parametrize("end", ["1 / 0", "raise KeyboardInterrupt", "raise SystemError"])
def test_nothing_is_left_of_a_check(two_ranks: Session, end: str) -> None:
    """Functions of numpy, and names, are as they were; what the cell raises does not matter."""
    look = (
        "str(np.array), str(np.nditer), type(grid) is np.ndarray, 'memoryview' in globals(), "
        "get_ipython().ast_transformers"
    )
    names = {"grid": np.zeros(12), "np": np}
    before = two_ranks.run(look, namespace=names, share=["grid"]).values
    with pytest.raises(ParallelError):
        two_ranks.run(f"grid[0] = rank\n{end}", namespace=names, check_races=True)
    assert two_ranks.run(look, namespace=names).values == before


def test_without_the_flag_nothing_of_it_is_there() -> None:
    """No rank loads what records before its first checked cell; operations are the same after it."""
    look = (
        "import sys, nbparallel.distributed as dist\n"
        "x = nbp.zeros(4)\nall_reduce(x)\nbarrier()\n"
        "loaded = [name for name in sys.modules if '.races.' in name]\n"
        "all_reduce.__module__, type(x) is np.ndarray, loaded"
    )
    with Session(1) as session:
        (before,) = session.run(look, namespace={"np": np}).values
        session.run("x[0] = 1", check_races=True)
        (after,) = session.run(look, namespace={"np": np}).values
    assert before[1:] == (True, [])
    assert after[:2] == before[:2]
    assert len(after[2]) > 5


def test_lines_of_an_installed_package_are_none_of_the_users() -> None:
    """Also if it lies in another environment, from which this one may import."""
    label = label_function("<ipython-input-1-1>")
    assert label("<ipython-input-1-1>") == ""
    assert label("/projects/mine.py") == "mine.py"
    assert label("/opt/base/lib/python3.12/site-packages/numpy/_core/_methods.py") is None
    assert label("/usr/lib/python3/dist-packages/numpy/_core/_methods.py") is None
