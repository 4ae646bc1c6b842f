"""scan and exscan on every route of the bytes; maxloc and minloc, of numbers and arrays."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.runtime.call_site import is_ours
from tests.distributed.conformance.oracle import located
from tests.harness.ranks import context_of

KIB = 1 << 10


def test_numbers(ranks: Any) -> None:
    """Ints stay exact, types may meet, a bool is an int; exscan has nothing for the first rank."""

    def work(c: Communicator) -> None:
        me, big = c.rank, 10**30
        assert c.scan(big + me) == sum(big + r for r in range(me + 1))
        assert c.exscan(big) == (me * big if me else None)
        assert c.scan(me if me % 2 else float(me), "max") == me
        assert c.scan(True) == me + 1
        assert c.scan(me, "avg") == me / 2
        assert c.exscan(me + 1, "product") == [None, 1, 2, 6][me]
        assert (c.exscan(5) or 0) == 5 * me
        assert c.scan(np.float32(1)).dtype == np.float32

    ranks(4, work)


def test_scan_refuses_what_all_reduce_refuses(ranks: Any) -> None:
    """Read-only arrays and dtypes without the operator raise on the caller."""

    def work(c: Communicator) -> None:
        for scan in (c.scan, c.exscan):
            name = scan.__name__
            with pytest.raises(ValueError, match=f"{name} works in place.* read-only"):
                scan(np.broadcast_to(1.0, (3,)))
            with pytest.raises(TypeError, match="avg"):
                scan(np.ones(3, int), "avg")

    ranks(2, work)


@pytest.mark.slow
def test_locations(ranks: Any) -> None:
    """The lowest location of several, ranks by default or what is passed; NaN wins, and values stay exact."""

    def work(c: Communicator) -> None:
        me = c.rank
        assert c.maxloc(me % 2) == (1, 1)
        assert c.minloc(me % 2) == (0, 0)
        assert c.maxloc(5, location=100 - me) == (5, 97)
        assert c.maxloc(10**30 + me) == (10**30 + 3, 3)
        value, where = c.minloc(float("nan") if me in (1, 2) else -1.0)
        assert value != value
        assert where == 1
        assert c.maxloc(True) == (1, 0)
        index = np.array([10, 20, 30]) + me
        value, where = c.maxloc(np.array([me, -me, 0.5]), location=index)
        assert (value.tolist(), where.tolist()) == ([3, 0, 0.5], [13, 20, 30])
        value, where = c.maxloc(np.array(me, "u2"))
        assert (value.shape, value.dtype, int(where)) == ((), np.dtype("u2"), 3)
        days = np.array(["2020-01-01", "NaT" if me == 2 else "2021-01-01"], "M8[D]") + np.timedelta64(me, "D")
        value, where = c.maxloc(days)
        assert where.tolist() == [3, 2]
        assert np.isnat(value[1])
        for size in (10, 20_000, 200_000):
            inputs = [np.random.default_rng(r).integers(0, 9, (size, 2)) for r in range(4)]
            x = context_of(c).store.share(inputs[me]) if me % 2 else np.asfortranarray(inputs[me])
            for found, name in ((c.maxloc(x), "maxloc"), (c.minloc(x), "minloc")):
                want = located(name, inputs, list(range(4)))
                assert all(np.array_equal(one, other) for one, other in zip(found, want, strict=True))
            assert np.array_equal(x, inputs[me])

    ranks(4, work)


@pytest.mark.parametrize("call", ["scan", "exscan", "maxloc", "reduce", "all_reduce"])
def test_an_error_comes_from_this_package_alone(ranks: Any, call: str) -> None:
    """A traceback without its frames ends at the user's line; a library's frame between them would stay."""

    def work(c: Communicator) -> None:
        for options in ({}, {"async_op": True}):
            with pytest.raises(TypeError) as caught:
                getattr(c, call)("a", **options)
            frames = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
            assert {name for name in frames if not is_ours(name)} == {__file__}

    ranks(2, work)
