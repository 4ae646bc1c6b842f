"""reduce and reduce_scatter give what numpy gives on the gathered inputs, and touch nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator


@pytest.mark.parametrize("n", [1, 2, 4])
def test_numbers_and_lists(ranks: Any, n: int) -> None:
    """Numbers return the result on the root; lists of numbers or of arrays of any shapes are combined."""

    def work(c: Communicator) -> None:
        me = c.rank
        for root in range(n):
            total = c.reduce(10**40 + me, dst=root)
            assert total == (n * 10**40 + sum(range(n)) if me == root else None)
            assert c.reduce(True, root, "max") == (1 if me == root else None)
            assert c.reduce(me, root, "avg") == (sum(range(n)) / n if me == root else None)
        assert c.reduce_scatter([r + me for r in range(n)]) == sum(me + r for r in range(n))
        assert c.reduce_scatter([r + me for r in range(n)], op="max") == me + n - 1
        number = np.zeros(())
        assert c.reduce_scatter(number, [r + me for r in range(n)]) is number
        assert number == sum(me + r for r in range(n))
        for size in (3, 20_000):
            parts = [np.full((r, size), float(me + r)) for r in range(n)]
            mine = c.reduce_scatter(parts)
            assert mine.shape == (me, size)
            assert (mine == sum(me + r for r in range(n))).all()
            output = np.zeros((me, size))
            assert c.reduce_scatter(output, parts, "min") is output
            assert (output == me).all()
            stacked = np.full((n, size), float(me))
            row = np.zeros(size)
            assert c.reduce_scatter_tensor(row, stacked) is row
            assert (row == sum(range(n))).all()
            c.reduce_scatter_single(row, stacked.reshape(-1), "max")
            assert (row == n - 1).all()

    ranks(n, work)
