"""Recording on real ranks: what the cell's code does in ways that numpy does not show; nothing is left."""

from __future__ import annotations

import numpy as np
import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session

pytest_plugins = ["nbparallel.testing.sessions"]
pytestmark = pytest.mark.by_turns
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
