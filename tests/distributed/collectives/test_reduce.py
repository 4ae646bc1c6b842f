"""reduce and reduce_scatter give what numpy gives on the gathered inputs, and touch nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from tests.distributed.conformance.oracle import DTYPES, OPERATORS, allowed, example, expected, same
from tests.harness.ranks import context_of

SIZES = (0, 1, 7, 3000, 9000, 300_000)
"""Inside a slot, beyond it, several chunks."""


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(90)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_dtype_size_operator_and_root(ranks: Any, n: int) -> None:
    """The result is numpy's in rank order; on the root in place, elsewhere no bit changes."""

    def work(c: Communicator) -> int:
        done, me = 0, c.rank
        for dtype, size, op in itertools.product(DTYPES, SIZES, OPERATORS):
            if not allowed(op, dtype) or (size > 7 and n == 3):
                continue
            if size > 3000 and (op not in ("sum", "avg") or dtype not in ("b1", "f2", "f8", "c16")):
                continue
            inputs = [example(dtype, size, r, 3) for r in range(n)]
            with np.errstate(all="ignore"):
                want = expected(op, inputs)
            part = np.array_split(want, n)[me]
            for make in (np.array, context_of(c).store.share):
                root = done % n
                x = make(inputs[me])
                found = c.reduce(x, root, op)
                if me == root:
                    assert found is x
                    assert same(x, want, dtype, op), (dtype, size, op)
                else:
                    assert found is None
                    assert x.tobytes() == inputs[me].tobytes()
                x = make(inputs[me])
                mine = c.reduce_scatter(x, op=op)
                assert same(mine, part, dtype, op), (dtype, size, op)
                assert x.tobytes() == inputs[me].tobytes()
                done += 1
        return done

    assert min(ranks(n, work, seconds=80)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_layouts_and_guards(ranks: Any, n: int) -> None:
    """Arrays that lie differently meet; what lies beside them stays; a read-only root gets a new array."""

    def work(c: Communicator) -> None:
        store, me = context_of(c).store, c.rank
        for size in (4, 3000, 50_000, 300_000):
            inputs = [example("f8", size, r, 4) for r in range(n)]
            want = expected("sum", inputs)
            for first, shift in itertools.product(range(5), (0, 1)):
                kind = (first + shift * me) % 5
                whole = (np.zeros, store.empty, np.zeros, store.empty, np.zeros)[kind]((size + 2, 2))
                whole[...] = 0
                x = whole[1:-1, 0] if kind in (2, 3) else whole.reshape(-1)[1 : size + 1]
                x[...] = inputs[me]
                if kind == 4:
                    x.flags.writeable = False
                root = first % n
                found = c.reduce(x, root)
                if me == root:
                    assert (found is x) == (kind != 4)
                    assert np.array_equal(found, want, equal_nan=True), (size, kind)
                    if kind != 4:
                        x[...] = inputs[me]
                assert np.array_equal(x, inputs[me], equal_nan=True)
                assert whole[0, 0] == whole[-1, -1] == 0
                part = c.reduce_scatter(x)
                assert np.array_equal(part, np.array_split(want, n)[me], equal_nan=True)
                guard = whole[: part.size + 2, 1] * 0
                filled = guard[1:-1]
                assert c.reduce_scatter(filled, np.array_split(x, n)) is filled
                assert np.array_equal(filled, part, equal_nan=True)
                assert guard[0] == guard[-1] == 0
        zero = np.array(float(me))
        found = c.reduce(zero, 0)
        assert me != 0 or (found is zero and zero == sum(range(n)))

    ranks(n, work)


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


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 40_000])
def test_an_output_inside_the_input(ranks: Any, size: int) -> None:
    """A part of the input may take the result, whoever still reads it, in private and shared memory."""

    def work(c: Communicator) -> None:
        for make in (np.array, context_of(c).store.share):
            for at in range(3):
                x = make(np.arange(3.0 * size) + c.rank)
                c.reduce_scatter_tensor(x[at * size : (at + 1) * size], x)
                want = 3 * np.arange(3.0 * size) + 3
                assert np.array_equal(x[at * size : (at + 1) * size], want.reshape(3, size)[c.rank])
                c.barrier()

    ranks(3, work)


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


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.reduce("x", 0), TypeError, "array or a number, not str"),
        (lambda c: c.reduce(np.array([1]), 0, "avg"), TypeError, "astype"),
        (lambda c: c.reduce(np.ones(2), 0, "summ"), ValueError, "'product'"),
        (lambda c: c.reduce(np.ones(2), -1), ValueError, "ranks are 0-1"),
        (lambda c: c.reduce_scatter(np.array([object()] * 2)), TypeError, "needs numbers"),
        (lambda c: c.reduce_scatter([1]), ValueError, "2 ranks, not 1"),
        (lambda c: c.reduce_scatter([1, "x"]), TypeError, "not str"),
        (lambda c: c.reduce_scatter([np.ones(1), 2]), TypeError, "part 1 is int"),
        (lambda c: c.reduce_scatter([np.ones(1), np.ones(1, "f4")]), TypeError, "one dtype"),
        (lambda c: c.reduce_scatter(np.ones(3), [np.ones(2)] * 2), ValueError, "this rank's part is"),
        (lambda c: c.reduce_scatter(np.broadcast_to(1.0, (2,)), [np.ones(2)] * 2), ValueError, "read-only"),
        (lambda c: c.reduce_scatter(1, [1, 2]), TypeError, "fills numpy arrays, not int"),
    ],
)
def test_wrong_arguments_hurt_only_the_caller(
    ranks: Any, call: Any, error: type[Exception], text: str
) -> None:
    """A wrong argument raises at once, nothing is sent, and the next operation works."""

    def work(c: Communicator) -> None:
        with pytest.raises(error, match=text):
            call(c)
        assert c.all_reduce(1) == 2

    ranks(2, work)
