"""Every collective, operator, dtype, group and root gives numpy's result, and writes nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.reduce import OPERATORS
from tests.distributed.conformance import (
    ALL,
    MOVES,
    NUMERIC,
    OTHERS,
    REDUCTIONS,
    ROOTED,
    Setting,
    complete,
    groups,
)
from tests.distributed.guarded import LAYOUTS, Guards
from tests.distributed.oracle import allowed

SIZES = (7, 0, 1, 300, 1500)
"""They, the layouts and `async_op` take turns, so that each meets every collective; large arrays are in
`test_all_reduce`, `test_reducing` and `test_moving`."""


def every_case() -> list[tuple[str, str, str]]:
    """Return collective, operator and dtype of all that is possible."""
    found = [
        (name, op, dtype)
        for name, op, dtype in itertools.product(REDUCTIONS, OPERATORS, NUMERIC)
        if allowed(op, dtype)
    ]
    return found + [(name, "", dtype) for name, dtype in itertools.product(MOVES, NUMERIC + OTHERS)]


@pytest.mark.time_limit(600)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_collective(ranks: Any, n: int) -> None:
    """Collective × operator × dtype × kind of group × root, with guards beside every buffer."""

    def work(c: Communicator) -> int:
        turn = count = 0
        left_out = {3: 0, 4: 1}.get(n)  # half of them with three ranks, the other half with four
        for group, members in groups(c):
            for name, op, dtype in every_case():
                roots = range(len(members)) if name in ROOTED else [0]
                for root in roots:
                    turn += 1
                    if c.rank not in members or turn % 2 == left_out:
                        continue
                    setting = Setting(
                        c, group, members, root, dtype, SIZES[turn % 5], op,
                        LAYOUTS[(turn + c.rank) % 6], later=turn % 7 == 0, salt=turn,
                    )  # fmt: skip
                    case = ALL[name](setting)
                    complete(case, next(case), setting)
                    count += 1
        return count

    assert min(ranks(n, work, seconds=500)) > 350


def test_guards_notice(ranks: Any) -> None:
    """One byte beside a buffer, between its elements, or in an input, is noticed."""

    def work(c: Communicator) -> None:
        for layout in LAYOUTS:
            for at in (0, 63, -1, -64):
                guards = Guards(c)
                guards.buffer((3, 2), "f4", layout)[...] = 1
                guards.check()
                memory, _ = guards._surroundings[0]
                memory[at] = 0
                with pytest.raises(AssertionError, match="beside"):
                    guards.check()
            guards = Guards(c)
            guards.input(np.ones(3), layout)[1] = 2
            with pytest.raises(AssertionError, match="input"):
                guards.check()
        guards = Guards(c)
        guards.buffer(3, "f4", "strided")
        memory, outside = guards._surroundings[0]
        assert len(outside) == len(memory) - 12
        memory[64 + 4] = 0
        with pytest.raises(AssertionError, match="beside"):
            guards.check()

    ranks(1, work)
