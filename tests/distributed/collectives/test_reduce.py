"""reduce and reduce_scatter give what numpy gives on the gathered inputs, and touch nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of

SIZES = (0, 1, 7, 3000, 9000, 300_000)
"""Inside a slot, beyond it, several chunks."""


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


def test_memory_that_several_use(ranks: Any) -> None:
    """The root's array may not be another rank's too; a part that is to be filled neither; others may."""

    def work(c: Communicator) -> None:
        store, me = context_of(c).store, c.rank
        for size in (6, 3000, 60_000):
            handle = None
            if me == 0:
                whole = store.empty(4 * size)
                whole[...] = 1
                handle = store.handle(whole, writable=True)
            handle = c.broadcast(handle)
            if me:
                whole = store.attach(handle, writable=True)
            with pytest.raises(ValueError, match="overlapping memory"):
                c.reduce(whole, 0)
            with pytest.raises(ValueError, match="overlapping memory"):
                c.reduce_scatter(whole[:size], [np.ones(size)] * 3)
            with pytest.raises(ValueError, match="overlapping memory"):
                c.reduce_scatter(whole[size * me : size * (me + 1)], whole[: 3 * size])
            assert (whole == 1).all()
            c.barrier()
            frozen = whole.view()
            frozen.flags.writeable = False
            found = c.reduce(frozen, 0)
            assert found is None or (found == 3).all()
            assert (c.reduce_scatter(whole) == 3).all()
            c.barrier()

    ranks(3, work)
