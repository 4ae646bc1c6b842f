"""The reference page of operations lists what there is: every operator, every operation."""

import re
from pathlib import Path

import nbparallel.distributed as dist
from nbparallel.distributed.operators import OPERATORS

REFERENCE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference"
PAGE = (REFERENCE / "operations.md").read_text()
NOT_FOR_USERS = {"Communicator", "call_with_rank", "current", "set_current"}  # what the engine uses


def test_all_operators_are_on_the_page() -> None:
    """The page's list of operators, the enumeration and the table that computes agree."""
    listed = re.search(r"Operators, as .*?: `([a-z ]+)`", PAGE)
    assert listed
    assert listed[1].split() == list(OPERATORS) == [op.value for op in dist.ReduceOp]


def test_all_operations_are_on_the_page() -> None:
    """Every public name of `nbparallel.distributed` occurs on the page, in code."""
    code = " ".join(re.findall(r"`[^`]+`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))
    missing = [name for name in dist.__all__ if not re.search(rf"\b{name}\b", code)]
    assert set(missing) <= NOT_FOR_USERS
