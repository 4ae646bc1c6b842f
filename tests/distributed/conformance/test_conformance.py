"""Every collective, operator, dtype, group and root gives numpy's result, and writes nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from nbparallel.distributed import Communicator, operators
from tests.distributed.conformance.cases import (
    ALL,
    LOCATING,
    MOVES,
    NUMERIC,
    ORDERED,
    OTHERS,
    REDUCTIONS,
    ROOTED,
    Setting,
    complete,
    groups,
)
from tests.distributed.conformance.guarded import LAYOUTS
from tests.distributed.conformance.oracle import OPERATORS, allowed

SIZES = (7, 0, 1, 300, 1500)
"""They, the layouts and `async_op` take turns, so that each meets every collective; large arrays are in
`test_in_place_suite` and `test_many_collectives`."""


def every_case() -> list[tuple[str, str, str]]:
    """Return collective, operator and dtype of all that is possible."""
    found = [
        (name, op, dtype)
        for name, op, dtype in itertools.product(REDUCTIONS, OPERATORS, NUMERIC)
        if allowed(op, dtype)
    ]
    found += [(name, "", dtype) for name, dtype in itertools.product(LOCATING, ORDERED)]
    return found + [(name, "", dtype) for name, dtype in itertools.product(MOVES, NUMERIC + OTHERS)]


def call_all(c: Communicator, one_of: int = 1, first: int = 0, layouts: Sequence[str] = LAYOUTS) -> int:
    """Run every case, or one of so many, each with other size, layouts and so on; return how many."""
    turn = count = 0
    for group, members in groups(c):
        for name, op, dtype in every_case():
            for root in range(len(members)) if name in ROOTED else [0]:
                turn += 1
                if c.rank not in members or turn % one_of != first:
                    continue
                setting = Setting(
                    c, group, members, root, dtype, SIZES[turn % 5], op,
                    layouts[(turn + c.rank) % len(layouts)], later=turn % 7 == 0, salt=turn,
                )  # fmt: skip
                case = ALL[name](setting)
                complete(case, next(case), setting)
                count += 1
    return count


@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.time_limit(600)
@pytest.mark.parametrize(
    ("n", "one_of", "first", "least"), [(1, 1, 0, 800), (2, 1, 0, 1500), (3, 3, 0, 500), (4, 3, 1, 500)]
)
def test_every_collective(ranks: Any, n: int, one_of: int, first: int, least: int) -> None:
    """Collective × operator × dtype × kind of group × root, with guards beside every buffer.

    A third of them with three ranks, another with four; the whole of it is in the long runs.
    """
    assert min(ranks(n, lambda c: call_all(c, one_of, first), seconds=500)) >= least


@pytest.mark.stress
@pytest.mark.once
@pytest.mark.time_limit(3600)
@pytest.mark.parametrize("n", [3, 4])
def test_every_collective_whole(ranks: Any, n: int) -> None:
    """All of it with three and four ranks."""
    assert min(ranks(n, call_all, seconds=3000)) > 1900


def test_the_oracle_knows_every_operator() -> None:
    """What `all_reduce` accepts is what `ReduceOp` names, and every operator is in the cases above."""
    assert set(operators.OPERATORS) == set(OPERATORS) == {op.value for op in operators.ReduceOp}
