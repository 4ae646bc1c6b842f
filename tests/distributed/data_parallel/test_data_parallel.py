"""average_gradients, shard and batches on ranks: right averages, equal bits, clear errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.data_parallel.gradients import BUCKET
from nbparallel.errors import CollectiveMismatchError
from tests.harness.ranks import context_of

SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (), (7,), (0, 2), (40, 50), (1, 1, 1))


def gradients_of(rank: int, dtype: str, shapes: Any = SHAPES) -> list[np.ndarray[Any, Any]]:
    """Return what one rank brings."""
    rng = np.random.default_rng(rank)
    turn = 1 + 1j if "c" in dtype else 1
    return [np.array(rng.normal(size=shape) * turn, dtype) for shape in shapes]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.time_limit(60)
def test_averages(ranks: Any, n: int) -> None:
    """In place, over every dtype, layout and bucket size, as all_reduce would one by one; the same bits."""

    def work(c: Communicator) -> list[bytes]:
        bits = []
        for dtype in ("<f8", "<f4", ">f8", "<f2", "<c16", "<c8"):
            mine = [gradients_of(r, dtype) for r in range(n)]
            for bucket_nbytes in (1, 100, 20_000, BUCKET):
                arrays = [np.array(x, order="F" if c.rank else "C") for x in mine[c.rank]]
                strided = np.zeros((6, 8), dtype)
                arrays[0] = strided[::2, ::2]
                arrays[0][...] = mine[c.rank][0]
                if c.rank == n - 1:
                    arrays[4] = context_of(c).store.share(arrays[4])
                result = c.average_gradients(arrays, bucket_nbytes=bucket_nbytes)
                assert result is arrays
                for i, x in enumerate(arrays):
                    want = sum((m[i] for m in mine[1:]), mine[0][i]) / n
                    assert x.dtype == np.dtype(dtype)
                    assert np.array_equal(x, np.asarray(want, dtype)), (dtype, bucket_nbytes, i)
                assert not strided[1::2].any()
                assert not strided[:, 1::2].any()
                bits.append(b"".join(x.tobytes() for x in arrays))
        return bits

    values = ranks(n, work, seconds=50)
    assert all(value == values[0] for value in values)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_array_dict_and_large(ranks: Any, n: int) -> None:
    """One array, a dict in any order of keys, mixed dtypes, and arrays larger than a bucket work alike."""

    def work(c: Communicator) -> bytes:
        one = np.full(5, float(c.rank))
        assert c.average_gradients(one) is one
        large = np.full((300, 7000), np.float32(c.rank)).T  # 8 MB
        named = {"w": large, "b": np.full(3, c.rank + 1.0), 3: np.array(c.rank * 1j)}
        if c.rank:
            named = dict(reversed(named.items()))
        assert c.average_gradients(named) is named
        mean = (n - 1) / 2
        assert (one == mean).all()
        assert (large == mean).all()
        assert (named["b"] == mean + 1).all()
        assert named[3] == mean * 1j
        assert c.average_gradients([]) == []
        assert c.average_gradients(x for x in [one]) is not None
        return one.tobytes()

    assert len(set(ranks(n, work))) == 1


def test_weights(ranks: Any) -> None:
    """With the batch sizes as weights it is the average over all samples; who has none may bring NaN."""

    def work(c: Communicator) -> float:
        rows = np.arange(10.0)[[slice(0, 7), slice(7, 10), slice(0, 0)][c.rank]]
        with np.errstate(all="ignore"):
            gradient = np.divide(rows.sum(), len(rows)) * np.ones(3)
        large = np.full(BUCKET // 8, np.inf if c.rank == 2 else float(c.rank))
        c.average_gradients([gradient, np.ones(2), large], weight=len(rows))
        assert (large == np.float64(0.3)).all()
        assert gradient == pytest.approx(4.5)
        for bad, kind in ((-1, ValueError), (float("nan"), ValueError), ("3", TypeError), (1j, TypeError)):
            with pytest.raises(kind, match="weight must be"):
                c.average_gradients(gradient, weight=bad)
        with pytest.raises(ValueError, match="weights of all ranks are 0"):
            c.average_gradients(gradient, weight=0)
        with pytest.raises(ValueError, match=r"ranks 1-2 passed weight=.* and rank 0 did not"):
            c.average_gradients(gradient, weight=1 if c.rank else None)
        assert gradient == pytest.approx(4.5)
        return float(gradient[0])

    assert len(set(ranks(3, work))) == 1


def test_mismatches_name_the_array(ranks: Any) -> None:
    """Another number, shape, dtype, name or bucket size raises on all ranks, and nothing was written."""
    three = "float64 of shape (3,)"
    text = {
        "number": "ranks 0, 2 passed 2 arrays; rank 1 passed 3 arrays; the first that differs: "
        f"ranks 0, 2 passed no more; rank 1 passed arrays[2], {three}",
        "shape": f"ranks 0, 2 passed arrays[1], {three}; rank 1 passed arrays[1], float64 of shape (4,)",
        "dtype": f"ranks 0, 2 passed arrays[1], {three}; rank 1 passed arrays[1], float32 of shape (3,)",
        "name": f"ranks 0, 2 passed arrays['b'], {three}; rank 1 passed arrays['c'], {three}",
        "bucket": "ranks 0, 2 passed bucket_nbytes=8; rank 1 passed bucket_nbytes=9",
    }

    def work(c: Communicator) -> dict[str, str]:
        odd = c.rank == 1
        x, y = np.full(3, float(c.rank)), np.full(3, 5.0 + c.rank)
        calls: dict[str, tuple[Any, dict[str, Any]]] = {
            "number": ([x, y, y.copy()] if odd else [x, y], {}),
            "shape": ([x, np.zeros(4) if odd else y], {}),
            "dtype": ([x, y.astype("f4") if odd else y], {}),
            "name": ({"a": x, "c" if odd else "b": y}, {}),
            "bucket": ([x, y], {"bucket_nbytes": 9 if odd else 8}),
        }
        said = {}
        for name, (arrays, options) in calls.items():
            with pytest.raises(CollectiveMismatchError) as caught:
                c.average_gradients(arrays, **options)
            said[name] = str(caught.value)
        assert (x == c.rank).all()
        assert (y == 5 + c.rank).all()
        c.average_gradients([x, y])
        assert (x == 1).all()
        return said

    for said in ranks(3, work):
        for name, words in text.items():
            start = "average_gradients: ranks passed different arrays: "
            assert said[name] == f"{start}{words}. Nothing was written"


def test_what_cannot_be_averaged(ranks: Any) -> None:
    """Integers, read-only arrays, arrays over one another and no arrays at all are errors of the caller."""

    def work(c: Communicator) -> int:
        x, fixed = np.ones(5), np.ones(3)
        fixed.flags.writeable = False
        for arrays, kind, words in (
            (np.ones(3, int), TypeError, "arrays is int64"),
            ([x, np.ones(3, bool)], TypeError, r"arrays\[1\] is bool"),
            (np.ones(3, "i4,f8"), TypeError, "floating-point"),
            ({"w": fixed}, ValueError, r"arrays\['w'\], which is read-only"),
            ([x[:3], x[2:]], ValueError, r"arrays\[0\] and arrays\[1\] share memory"),
            ([x, None], TypeError, r"arrays\[1\] is NoneType"),
            (np.ma.ones(3), TypeError, "MaskedArray"),
            (np.array([None]), TypeError, "object"),
            (3, TypeError, "a list of arrays or a dict of them, not int"),
            ("w", TypeError, "not str"),
        ):
            with pytest.raises(kind, match=words):
                c.average_gradients(arrays)
        for bad in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match="bucket_nbytes must be"):
                c.average_gradients(x, bucket_nbytes=bad)  # type: ignore[arg-type]
        return c.all_reduce(1)  # type: ignore[no-any-return]

    assert ranks(2, work) == [2, 2]


@pytest.mark.parametrize(
    ("count", "size", "operations"), [(1, 10, 1), (20, 10, 1), (500, 10, 1), (3, 131_072, 3)]
)
def test_how_many_operations(ranks: Any, count: int, size: int, operations: int) -> None:
    """No more than reductions: the first of them compares what the ranks pass."""

    def work(c: Communicator) -> int:
        arrays = [np.full(size, float(c.rank + i)) for i in range(count)]
        before = context_of(c).operations
        c.average_gradients(arrays)
        assert all((x == i + 0.5).all() for i, x in enumerate(arrays))
        return context_of(c).operations - before

    assert ranks(2, work) == [operations] * 2


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_parts(ranks: Any, n: int) -> None:
    """A shard is a view of this rank's part, the parts are those of array_split, also in a group."""

    def work(c: Communicator) -> tuple[Any, ...]:
        x = np.arange(14).reshape(7, 2)
        part = c.shard(x)
        assert np.shares_memory(part, x) == bool(part.size)
        assert part.tolist() == np.array_split(x, n)[c.rank].tolist()
        assert c.shard(list("abcdefg")) == list("abcdefg")[c.local_slice(np.int64(7))]
        assert len(c.shard(x[:0])) == 0
        x.flags.writeable = False
        assert not c.shard(x).flags.writeable
        for bad, kind in (
            (np.array(3), ValueError), ("abc", TypeError), (5, TypeError), ({1}, TypeError),
        ):  # fmt: skip
            with pytest.raises(kind, match="shard divides"):
                c.shard(bad)
        for bad, kind in ((-1, ValueError), (2.5, TypeError), (True, TypeError), (x, TypeError)):
            with pytest.raises(kind):
                c.local_slice(bad)
        with pytest.raises(TypeError, match=r"`x\.iloc\[dist\.local_slice"):
            c.shard(SimpleNamespace(iloc=x))
        last = c.new_group(range(n - 1, n))
        if c.rank == n - 1:
            assert c.local_slice(7, last) == slice(0, 7)
        else:
            with pytest.raises(ValueError, match=f"rank {c.rank} is not in"):
                c.shard(x, group=last)
        return tuple(part[:, 0])

    assert sum(ranks(n, work), ()) == tuple(range(0, 14, 2))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.time_limit(60)
def test_batches(ranks: Any, n: int) -> None:
    """Together the ranks see each row once an epoch, and a collective in the loop always meets."""

    def work(c: Communicator) -> list[list[int]]:
        x = np.arange(23)
        y = context_of(c).store.share(x * 2.0)
        seen: list[list[int]] = []
        for epoch in range(3):
            seen.append([])
            batches = c.batches(x, y, batch_size=3, epoch=epoch, seed=5)
            assert len(set(c.all_gather(len(batches)))) == 1
            for xb, yb in batches:
                assert (yb == 2 * xb).all()
                seen[-1] += xb.tolist()
                total = c.all_reduce(len(xb))
                assert total == 3 * n or total == 23 % (3 * n)
        return seen

    values = ranks(n, work, seconds=50)
    for epoch in range(3):
        assert sorted(i for value in values for i in value[epoch]) == list(range(23))
    assert n > 1 or values[0][0] != values[0][1]


def test_batches_that_do_not_fit(ranks: Any) -> None:
    """Ranks that pass different numbers, and a size that leaves no batch, raise on all of them."""

    def work(c: Communicator) -> list[str]:
        x = np.arange(10)
        said = []
        for kind, arrays, options in (
            (CollectiveMismatchError, [x], {"epoch": c.rank // 2}),
            (CollectiveMismatchError, [x[: 9 + c.rank % 2]], {"epoch": 0}),
            (CollectiveMismatchError, [x], {"epoch": 0, "seed": 1 + (c.rank == 1), "drop_last": c.rank == 0}),
            (ValueError, [x], {"epoch": 0, "batch_size": 4, "drop_last": True}),
            (TypeError, [], {"epoch": 0}),
            (TypeError, [[1, 2]], {"epoch": 0}),
            (TypeError, [np.array(3)], {"epoch": 0}),
            (ValueError, [x, x[1:]], {"epoch": 0}),
            (ValueError, [x], {"epoch": -1}),
            (TypeError, [x], {"epoch": 0, "seed": None}),
            (ValueError, [x], {"epoch": 0, "batch_size": 0}),
        ):
            with pytest.raises(kind) as caught:
                c.batches(*arrays, **{"batch_size": 2, **options})
            said.append(str(caught.value))
        assert len(c.batches(x[:0], batch_size=3, epoch=0, drop_last=True)) == 0
        pair = c.new_group([0, 2])
        if c.rank != 1:
            batches = c.batches(x, batch_size=4, epoch=0, shuffle=False, group=pair)
            assert [b.tolist() for b in batches] == (
                [[0, 1, 2, 3], [8]] if c.rank == 0 else [[4, 5, 6, 7], [9]]
            )
        c.barrier()
        return said

    values = ranks(3, work)
    assert values[0] == values[1] == values[2]
    said = values[0]
    assert said[0].endswith("ranks 0-1 passed epoch=0; rank 2 passed epoch=1")
    assert said[1].endswith("ranks 0, 2 passed samples=9; rank 1 passed samples=10")
    assert "ranks 0, 2 passed seed=1; rank 1 passed seed=2; rank 0 passed drop_last=True" in said[2]
    assert "10 samples do not make one batch of 4 on each of 3 ranks" in said[3]


@pytest.mark.parametrize("size", [5, 3000, 200_000])
@pytest.mark.parametrize("n", [2, 3])
def test_some_ranks_say_more(ranks: Any, n: int, size: int) -> None:
    """One rank passes memory of another one, the others private arrays: all come to the same averages."""

    def work(c: Communicator) -> bytes:
        packed = None
        if c.rank == 0:
            mine = context_of(c).store.share(np.zeros(size))
            memory = context_of(c).memory
            packed = memory.packed(mine, memory.span_of(mine))
        packed = c.broadcast(packed, src=0)
        theirs = context_of(c).memory.attach(packed, writable=True) if c.rank == n - 1 else np.zeros(size)
        for turn in range(3):
            arrays = [np.full(7, 1.0 * c.rank), theirs, np.full((3, 2), c.rank, "c8")]
            theirs[...] = c.rank + turn
            before = context_of(c).operations
            c.average_gradients(arrays)
            assert context_of(c).operations - before > 1
            assert [x.ravel()[0] for x in arrays] == [(n - 1) / 2, (n - 1) / 2 + turn, (n - 1) / 2]
        c.barrier()
        return theirs.tobytes()

    assert len(set(ranks(n, work))) == 1


def test_another_operation_on_one_rank(outcomes: Any) -> None:
    """all_reduce on one rank, average_gradients on the other: an error that names both, nothing written."""

    def work(c: Communicator) -> None:
        x = np.full(2000, float(c.rank))
        try:
            c.average_gradients([x]) if c.rank else c.all_reduce(x, "avg")
        finally:
            assert (x == c.rank).all()

    for outcome in outcomes(2, work):
        assert isinstance(outcome.error, CollectiveMismatchError), outcome
        assert "average_gradients" in str(outcome.error)
        assert "all_reduce" in str(outcome.error)
