"""gather, all_gather, scatter and all_to_all give what a sequential model gives, for any value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of


def example(dtype: str, shape: Any, rank: int, salt: int = 0) -> np.ndarray[Any, Any]:
    """Return an array that tells who made it."""
    count = int(np.prod(shape))
    data = (np.arange(count) * 7 + rank * 31 + salt) % 97
    return data.astype("u1").astype(dtype).reshape(shape)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_any_object_and_any_size(ranks: Any, n: int) -> None:
    """Objects, numbers, None, 0-d arrays and arrays of other sizes and dtypes on every rank."""

    def work(c: Communicator) -> None:
        me = c.rank
        samples: list[Any] = [
            None, 7, 2.5, 10**30, "text", b"bytes" * 20_000, [1, {"a": (2, None)}], "x" * 200_000,
            np.float32(3),
        ]  # fmt: skip
        for shift in range(len(samples)):
            everybody = [samples[(shift + r) % len(samples)] for r in range(n)]
            assert c.all_gather(everybody[me]) == everybody
            assert c.gather(everybody[me], dst=n - 1) == (everybody if me == n - 1 else None)
            assert c.scatter(everybody if me == 0 else None) == everybody[me]
            assert c.all_to_all([(me, value) for value in everybody]) == [
                (r, everybody[me]) for r in range(n)
            ]
        uneven = [example(("f8", "i2", "U3")[r % 3], (10_000 * r, r + 1), r) for r in range(n)]
        assert all(map(np.array_equal, c.all_gather(uneven[me]), uneven))
        assert np.array_equal(c.scatter(uneven if me == n - 1 else None, src=n - 1), uneven[me])
        assert all(np.array_equal(x, uneven[me]) for x in c.all_to_all(uneven))
        zero = c.all_gather(np.array(float(me)))
        assert [x.shape for x in zero] == [()] * n
        assert [float(x) for x in zero] == list(range(n))
        mixed = c.all_gather(np.ones(3) if me == 0 else ["no array", me])
        assert mixed[0].sum() == 3
        assert mixed[1:] == [["no array", r] for r in range(1, n)]
        objects = np.array([None, {me}], dtype=object)
        assert [x[1] for x in c.all_gather(objects)] == [{r} for r in range(n)]

    ranks(n, work)


def test_results_are_the_callers_own(ranks: Any) -> None:
    """What returns can be written without anybody else's value changing, its own input included."""

    def work(c: Communicator) -> None:
        for size in (10, 50_000):
            for make in (np.array, context_of(c).store.share):
                x = make(np.full(size, float(c.rank)))
                for found in (
                    c.all_gather(x),
                    c.all_to_all([x] * 3),
                    [c.scatter([x] * 3 if c.rank == 0 else None)],
                ):
                    for value in found:
                        assert not np.shares_memory(value, x)
                        value[...] = -1
                c.barrier()
                assert (x == c.rank).all()
                value = {"x": [c.rank]}
                c.all_gather(value)[c.rank]["x"].append(1)
                assert value == {"x": [c.rank]}

    ranks(3, work)


@pytest.mark.parametrize("n", [1, 3])
def test_views(ranks: Any, n: int) -> None:
    """With view=True shared arrays arrive read-only, as the same memory, in any layout."""

    def work(c: Communicator) -> None:
        me = c.rank
        for shape in ((4, 6), (400, 600)):
            x = context_of(c).store.share(example("f8", shape, me))
            y = x[::2, ::-1]
            for value in (x, y):
                for views in (c.all_gather(value, view=True), c.gather(value, dst=0, view=True) or []):
                    for r, view in enumerate(views):
                        want = example("f8", shape, r)
                        assert np.array_equal(view, want if value is x else want[::2, ::-1])
                        assert not view.flags.writeable
                shown = c.broadcast(value if me == n - 1 else None, src=n - 1, view=True)
                assert not shown.flags.writeable
                parts = c.all_to_all(value, view=True)
                assert not any(part.flags.writeable for part in parts)
            everybody = c.all_gather(x, view=True)
            part = c.scatter(x if me == 0 else None, view=True)
            c.barrier()
            x[...] = me + 1000
            c.barrier()
            assert all((view == r + 1000).all() for r, view in enumerate(everybody)), "the same memory"
            assert (part == 1000).all()
            c.barrier()
        for call in (
            lambda: c.all_gather(np.ones(3), view=True),
            lambda: c.all_gather([np.ones(3)] * n, np.ones(3), view=True),
            lambda: c.scatter([np.ones(3)] * n if me == 0 else np.ones(3), view=True),
        ):
            with pytest.raises(ValueError, match=r"share it first|fills no array"):
                call()
            if n > 1:
                break  # the others would wait for who is refused only on one rank

    ranks(n, work)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_one_array_for_all(ranks: Any, n: int) -> None:
    """Torch's forms with one array: stacked, in place, and a list whose arrays are also what is brought."""

    def work(c: Communicator) -> None:
        me = c.rank
        for rows in (0, 3, 5000):
            everybody = [example("f4", (rows, 3), r) for r in range(n)]
            stacked = np.zeros((n, rows, 3), "f4")
            c.all_gather_single(stacked, everybody[me])
            assert np.array_equal(stacked, np.stack(everybody))
            stacked[...] = 0
            stacked[me] = everybody[me]
            c.all_gather_into_tensor(stacked, stacked[me])
            assert np.array_equal(stacked, np.stack(everybody))
        x = np.arange(n * 2.0).reshape(n, 2) + 100 * me
        c.all_to_all(list(x), list(x)[::-1])
        assert np.array_equal(x, [np.array([0.0, 1]) + 2 * (n - 1 - me) + 100 * r for r in range(n)])

    ranks(n, work)


@pytest.mark.parametrize("n", [1, 3])
def test_object_lists(ranks: Any, n: int) -> None:
    """Torch's operations on lists of objects fill the lists."""

    def work(c: Communicator) -> None:
        me = c.rank
        everybody: list[Any] = [None] * n
        c.all_gather_object(everybody, {"rank": me})
        assert everybody == [{"rank": r} for r in range(n)]
        gathered: list[Any] | None = [None] * n if me == n - 1 else None
        c.gather_object(me * "x", gathered, dst=n - 1)
        assert gathered is None or gathered == [r * "x" for r in range(n)]
        values: list[Any] = [1, "two", [3]] if me == 0 else [None] * 3
        c.broadcast_object_list(values, src=0)
        assert values == [1, "two", [3]]
        taken: list[Any] = [None]
        c.scatter_object_list(taken, [(r, "part") for r in range(n)] if me == 0 else None, src=0)
        assert taken == [(me, "part")]
        if n > 1:
            if me == 0:
                c.send_object_list([1, None, "x"], dst=1)
                c.send_object_list([1], dst=1)
            if me == 1:
                got: list[Any] = [0, 0, 0]
                assert c.recv_object_list(got, src=0) == 0
                assert got == [1, None, "x"]
                with pytest.raises(ValueError, match="list of 1"):
                    c.recv_object_list(got, src=0)
                assert got == [1, None, "x"]

    ranks(n, work)


WRONG: list[tuple[Any, type[Exception], str]] = [
    *(
        (lambda c, x, v=value, op=op: c.all_reduce(v, op), error, text)
        for value, op, error, text in (
            ("x", "sum", TypeError, "array or a number, not str"),
            ([1, 2], "sum", TypeError, "np.array"),
            (None, "sum", TypeError, "NoneType"),
            (np.array([1, 2]), "avg", TypeError, "astype"),
            (np.array([1.5]), "band", TypeError, "band"),
            (1.5, "bor", TypeError, "integers"),
            (np.array([object()]), "sum", TypeError, "needs numbers"),
            (np.array(["a"]), "sum", TypeError, "needs numbers"),
            (np.ones(2), "summ", ValueError, "'product'"),
            (np.ones(2), 3, TypeError, "string"),
            (np.broadcast_to(np.ones(1), (3,)), "sum", ValueError, r"x\.copy\(\)"),
        )
    ),
    *(
        (lambda c, x, s=src: c.broadcast(1, src=s), error, "src")
        for src, error in ((-1, ValueError), (2, ValueError), (True, TypeError), (0.0, TypeError))
    ),
    (lambda c, x: c.broadcast(np.broadcast_to(x, (2, 4)), src=1 - c.rank), ValueError, "read-only"),
    (lambda c, x: c.reduce("x", 0), TypeError, "array or a number, not str"),
    (lambda c, x: c.reduce(np.array([1]), 0, "avg"), TypeError, "astype"),
    (lambda c, x: c.reduce(np.ones(2), 0, "summ"), ValueError, "'product'"),
    (lambda c, x: c.reduce(np.ones(2), -1), ValueError, "ranks are 0-1"),
    (lambda c, x: c.reduce_scatter(np.array([object()] * 2)), TypeError, "needs numbers"),
    (lambda c, x: c.reduce_scatter([1]), ValueError, "2 ranks, not 1"),
    (lambda c, x: c.reduce_scatter([1, "x"]), TypeError, "not str"),
    (lambda c, x: c.reduce_scatter([np.ones(1), 2]), TypeError, "part 1 is int"),
    (lambda c, x: c.reduce_scatter([np.ones(1), np.ones(1, "f4")]), TypeError, "one dtype"),
    (lambda c, x: c.reduce_scatter(np.ones(3), [np.ones(2)] * 2), ValueError, "this rank's part is"),
    (lambda c, x: c.reduce_scatter(np.broadcast_to(1.0, (2,)), [np.ones(2)] * 2), ValueError, "read-only"),
    (lambda c, x: c.reduce_scatter(1, [1, 2]), TypeError, "fills numpy arrays, not int"),
    (lambda c, x: c.all_gather([x], x), ValueError, "one array for each of the 2 ranks, and has 1"),
    (lambda c, x: c.all_gather(x, x), TypeError, "must be a list"),
    (lambda c, x: c.all_gather([x, x], x), ValueError, "share memory"),
    (lambda c, x: c.all_gather([x, 1], x), TypeError, "numpy arrays"),
    (lambda c, x: c.all_gather([np.broadcast_to(x, (2, 4)), x], x), ValueError, "read-only"),
    (lambda c, x: c.gather(x, 0), TypeError, "dst=0"),
    (lambda c, x: c.gather(x, [x.copy(), x], dst=1 - c.rank), ValueError, "the destination, passes"),
    (lambda c, x: c.gather(x, dst=2), ValueError, "ranks are 0-1"),
    (lambda c, x: c.gather(x, dst=0, group_dst=0), ValueError, "pass one of them"),
    (lambda c, x: c.scatter(x, [x, x], src=1 - c.rank), ValueError, "the source, passes"),
    (lambda c, x: c.scatter([x, x], src=1 - c.rank), TypeError, "the source, passes"),
    (lambda c, x: c.scatter([x], src=c.rank), ValueError, "2 ranks, not 1"),
    (lambda c, x: c.scatter(np.array(1), src=c.rank), ValueError, "no axis"),
    (lambda c, x: c.scatter("ab", src=c.rank), TypeError, "not str"),
    (lambda c, x: c.scatter({1, 2}, src=c.rank), TypeError, "not set"),
    (lambda c, x: c.all_to_all([x] * 3), ValueError, "2 ranks, not 3"),
    (lambda c, x: c.all_to_all(None), TypeError, "NoneType"),
    (lambda c, x: c.all_to_all_single(x, x[:3]), ValueError, "split sizes"),
    (lambda c, x: c.all_to_all_single(x, x.copy(), [1, 1]), ValueError, "add up to its 4 rows"),
    (lambda c, x: c.all_to_all_single(x, x.copy(), [5, -1]), ValueError, "add up to its 4 rows"),
    (lambda c, x: c.all_gather_into_tensor(x, x), ValueError, r"make \(2, 4\) or \(8,\)"),
    (lambda c, x: c.reduce_scatter_tensor(x, np.ones(7)), ValueError, r"make \(2, 4\) or \(8,\)"),
    (lambda c, x: c.all_gather_object([1], 1), ValueError, "each of the 2 ranks"),
    (lambda c, x: c.broadcast(x, src="0"), TypeError, "int"),
    (lambda c, x: c.broadcast(x, src=0, group="all"), TypeError, "new_group"),
    (lambda c, x: c.barrier(timeout=-1), ValueError, "negative"),
]


def test_wrong_arguments_hurt_only_the_caller(ranks: Any) -> None:
    """In every collective: it raises at once, nothing is sent or written, and the next operation works."""

    def work(c: Communicator) -> None:
        for call, error, text in WRONG:
            x = np.arange(4.0)
            with pytest.raises(error, match=text):
                call(c, x)
            assert np.array_equal(x, np.arange(4.0))
        assert c.all_gather(c.rank) == [0, 1]

    ranks(2, work)
