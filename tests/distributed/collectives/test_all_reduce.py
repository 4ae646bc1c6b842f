"""all_reduce gives what numpy gives on the gathered inputs, on every rank the same bits."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator, ReduceOp
from nbparallel.distributed.collectives.movements import check_number
from nbparallel.distributed.operators import Operator, find_operator, operator_for
from tests.harness.ranks import context_of

SIZES = (0, 1, 7, 1000, 3000, 40_000, 300_000)
"""Inside a slot, beyond `SHARED_INLINE`, beyond a slot, several chunks."""


@pytest.mark.parametrize("name", ["mean", "Average"])
def test_the_mean_is_called_avg(name: str) -> None:
    """Numpy's name for it is answered with ours."""
    with pytest.raises(ValueError, match="did you mean 'avg'"):
        find_operator(name)


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("n", [1, 2, 4])
def test_numbers(ranks: Any, n: int) -> None:
    """Numbers return the result: ints exact, types may mix, bool counts as int, NaN wins."""

    def work(c: Communicator) -> None:
        big = 10**40
        assert c.all_reduce(big + c.rank) == n * big + sum(range(n))
        assert c.all_reduce(c.rank if c.rank % 2 else float(c.rank)) == sum(range(n))
        assert c.all_reduce(True) == n
        assert type(c.all_reduce(True)) is int
        assert c.all_reduce(np.bool_(True)) == n
        assert c.all_reduce(c.rank, "avg") == sum(range(n)) / n
        assert c.all_reduce(c.rank + 1, ReduceOp.PRODUCT) == np.prod(range(1, n + 1))
        assert c.all_reduce(c.rank, "max") == n - 1
        assert c.all_reduce(float(-c.rank), "min") == 1 - n
        if n > 1:
            assert np.isnan(c.all_reduce(float("nan") if c.rank == 1 else 1.0, "max"))
            assert np.isnan(c.all_reduce(float("nan") if c.rank == 0 else 1.0, "min"))
        assert c.all_reduce(1 << c.rank, "bor") == (1 << n) - 1
        value = c.all_reduce(np.float32(1.5))
        assert value == 1.5 * n
        assert type(value) is np.float32
        assert c.all_reduce(1j) == n * 1j

    ranks(n, work)


def test_same_bits_everywhere_and_always(ranks: Any) -> None:
    """Private, shared, small and large: the same bits on every rank, run after run."""

    def work(c: Communicator) -> list[bytes]:
        found = []
        for size in (1000, 5000, 200_000):
            x = np.random.default_rng(c.rank).standard_normal(size).astype("f4")
            y = context_of(c).store.share(x)
            assert c.all_reduce(x).tobytes() == c.all_reduce(y).tobytes()
            found.append(x.tobytes())
        return found

    first = ranks(4, work)
    assert all(value == first[0] for value in [*first, *ranks(4, work)])


def test_subclasses(ranks: Any) -> None:
    """A matrix is reduced in place and returned; a masked array is refused before anything is sent."""

    def work(c: Communicator) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PendingDeprecationWarning)
            m = np.matrix([[1.0, 2.0]])
        assert c.all_reduce(m) is m
        assert m[0, 1] == 4
        with pytest.raises(TypeError, match="MaskedArray"):
            c.all_reduce(np.ma.masked_array([1.0], [True]))
        c.barrier()

    ranks(2, work)


def test_a_frame_is_refused_with_what_to_write() -> None:
    """An array of its own: what `to_numpy` gives may be read-only, and the result is written into it."""

    class Frame:
        def to_numpy(self) -> None:
            """Make it look like one of pandas."""

    with pytest.raises(TypeError, match=r"not Frame: use np\.array\(x\)$"):
        check_number(find_operator("sum"), Frame(), "all_reduce")
    with pytest.raises(TypeError, match=r"not Counter: all_gather\(x\) gives those of all ranks"):
        check_number(find_operator("sum"), Counter("ab"), "all_reduce")


def test_an_operator_s_kinds_are_enforced() -> None:
    """One that has no words of its own about other kinds refuses them all the same."""
    floats = Operator("floats", np.add, operator.add, kinds="f")
    assert operator_for(floats, np.dtype("f4")) is floats
    for dtype in ("i8", "c16", "?", "m8[s]"):
        with pytest.raises(TypeError, match="op='floats' does not work for arrays of dtype"):
            operator_for(floats, np.dtype(dtype))
    with pytest.raises(TypeError, match="needs numbers"):
        operator_for(floats, np.dtype("U1"))
