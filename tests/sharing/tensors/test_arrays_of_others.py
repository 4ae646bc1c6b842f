"""Operations on arrays of ml_dtypes and of what exports DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import PeerFailedError
from tests.harness.ranks import context_of, run_ranks
from tests.sharing.tensors.optional import Exporter, needs_ml_dtypes

LARGE = 400_000


def values_of(program: Any, n: int = 2) -> list[Any]:
    """Return what a program returns on each rank."""

    def whole(c: Communicator) -> tuple[Any]:
        return (program(c),)

    outcomes = run_ranks(n, whole, seconds=60)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerFailedError))
    return [outcome.value[0] for outcome in outcomes]  # of a rank that died there is no tuple


@needs_ml_dtypes
@pytest.mark.parametrize("size", [6, LARGE])
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_arrays_of_ml_dtypes_travel_and_are_reduced(name: str, size: int) -> None:
    """Of any size, private and shared: as arrays of numpy's own dtypes."""
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, name))

    def program(c: Communicator) -> None:
        shared = context_of(c).store.empty((size,), dtype)
        other = 1 - c.rank
        for x in (np.full(size, c.rank + 1).astype(dtype), shared):
            x[...] = c.rank + 1
            mine, theirs = x.copy(), np.full(size, other + 1).astype(dtype)
            for got in (c.sendrecv(x, other, other), c.all_gather(x)[other]):
                assert got.dtype == dtype
                assert np.array_equal(got, theirs)
            c.barrier()
            root = c.broadcast(x if c.rank == 0 else None)
            assert root.dtype == dtype
            assert root[-1] == 1
            c.assert_same(c.all_reduce(x))
            assert x[0] == x[-1] == 3
            assert c.reduce_scatter(mine)[-1] == 3
            assert c.all_reduce(mine, "max", async_op=True).result()[-1] == 2
        if name == "bfloat16":
            assert c.average_gradients([mine], weight=1)[0][0] == 2
            with pytest.raises(TypeError, match="dtype bfloat16"):
                c.all_reduce(x, "band")
        with pytest.raises(AssertionError, match="instead of"):
            c.assert_same(theirs)
        if c.rank:
            c.isend(shared, 0, view=True).wait()
            c.barrier()
        else:
            assert c.recv(src=1)[0] == 3
            c.barrier()

    values_of(program)


def test_what_exports_dlpack_is_taken_as_a_read_only_array() -> None:
    """It is sent and reduced as the array that it exports, and arrives as one; it cannot be filled."""

    def program(c: Communicator) -> None:
        x = Exporter(np.arange(4.0) + c.rank)
        for got in c.all_gather(x):
            assert type(got) is np.ndarray
        assert c.sendrecv(x, 1 - c.rank, 1 - c.rank).tolist() == (np.arange(4.0) + 1 - c.rank).tolist()
        part = c.reduce_scatter(x)
        assert part.tolist() == [[1, 3], [5, 7]][c.rank]
        found = c.reduce(x)
        assert found is None if c.rank else found.tolist() == [1, 3, 5, 7]
        for fill in (c.all_reduce, lambda x: c.recv(x, 0), lambda x: c.all_reduce(x, async_op=True)):
            with pytest.raises(ValueError, match="read-only"):
                fill(x)
        root = c.broadcast(Exporter(np.arange(3)) if c.rank == 0 else None)
        assert (root.array if c.rank == 0 else root).tolist() == [0, 1, 2]
        with pytest.raises(TypeError, match="another device than the CPU"):
            c.all_gather(Exporter(np.arange(3), device=2))
        c.assert_same(c.all_gather(x))

    values_of(program)
