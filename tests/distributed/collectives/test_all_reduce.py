"""all_reduce gives what numpy gives on the gathered inputs, on every rank the same bits."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator, ReduceOp
from nbparallel.distributed.collectives.all_reduce import check_number
from nbparallel.distributed.operators import Operator, find_operator, operator_for
from tests.distributed.conformance.oracle import DTYPES, OPERATORS, allowed, example, expected
from tests.harness.ranks import context_of

SIZES = (0, 1, 7, 1000, 3000, 40_000, 300_000)
"""Inside a slot, beyond `SHARED_INLINE`, beyond a slot, several chunks."""


def layouts(x: np.ndarray[Any, Any], communicator: Communicator) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays with the content of `x` that lie differently in memory."""
    n = x.size
    found = {"private": x.copy(), "shared": context_of(communicator).store.empty(x.shape, x.dtype)}
    strided = np.zeros(2 * n, x.dtype)[::2]
    shared_strided = context_of(communicator).store.empty((n, 2), x.dtype)[:, 1]
    guarded = np.zeros(n + 2, x.dtype)
    found |= {"strided": strided, "shared strided": shared_strided, "guarded": guarded[1:-1]}
    if n % 2 == 0:
        found["fortran"] = np.zeros((2, n // 2), x.dtype, order="F")
    for name, array in found.items():
        array[...] = x.reshape(array.shape) if name == "fortran" else x
    return found


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.time_limit(60)
def test_all_dtypes_sizes_operators(ranks: Any, n: int, sampled: Any) -> None:
    """Every numeric dtype, size and operator gives numpy's result in rank order, bit for bit."""
    every = itertools.product(DTYPES, SIZES, OPERATORS)
    fitting = [
        (dtype, size, op)
        for dtype, size, op in every
        if allowed(op, dtype) and (size <= 3000 or op in ("sum", "avg", "max"))
    ]
    cases = sampled(fitting, one_in=4)

    def work(c: Communicator) -> int:
        done = 0
        for dtype, size, op in cases:
            inputs = [example(dtype, size, r, 1) for r in range(n)]
            with np.errstate(all="ignore"):
                want = expected(op, inputs)
                for array in (inputs[c.rank].copy(), context_of(c).store.share(inputs[c.rank])):
                    result = c.all_reduce(array, op)
                    assert result is array
                    assert array.tobytes() == want.astype(dtype).tobytes(), (dtype, size, op)
                    done += 1
        return done

    assert min(ranks(n, work, seconds=50)) == 2 * len(cases) > 50


@pytest.mark.parametrize("name", ["mean", "Average"])
def test_the_mean_is_called_avg(name: str) -> None:
    """Numpy's name for it is answered with ours."""
    with pytest.raises(ValueError, match="did you mean 'avg'"):
        find_operator(name)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_layouts(ranks: Any, n: int) -> None:
    """Arrays that lie differently on each rank meet, elements beside them stay, and 0-d arrays work."""

    def work(c: Communicator) -> None:
        names = list(layouts(np.zeros(2), c))
        for size in (2, 2000, 50_000, 300_000):
            inputs = [example("f8", size, r, 2) for r in range(n)]
            want = expected("sum", inputs)
            for shift, first in itertools.product((0, 1), range(len(names))):
                mine = layouts(inputs[c.rank], c)
                # The fortran one is the only two-dimensional one: everybody takes it or nobody.
                usable = [k for k in names if k != "fortran"]
                name = names[first] if names[first] == "fortran" else usable[(first + shift * c.rank) % 5]
                array = mine[name]
                result = c.all_reduce(array)
                assert result is array
                assert np.array_equal(array.reshape(-1), want, equal_nan=True), (name, size)
                if name == "guarded":
                    assert array.base is not None
                    assert array.base[0] == array.base[-1] == 0
        zero = np.array(float(c.rank))
        assert c.all_reduce(zero) is zero
        assert zero == sum(range(n))

    ranks(n, work)


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


@pytest.mark.parametrize(
    ("x", "op", "error", "text"),
    [
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
    ],
)
def test_wrong_arguments_hurt_only_the_caller(
    ranks: Any, x: Any, op: Any, error: type[Exception], text: str
) -> None:
    """A wrong argument raises at once, nothing is sent, and the next operation works."""

    def work(c: Communicator) -> None:
        with pytest.raises(error, match=text):
            c.all_reduce(x, op)
        assert c.all_reduce(1) == 2

    ranks(2, work)


def test_the_same_memory_twice(ranks: Any) -> None:
    """Overlapping parts of one shared array raise on every rank, untouched; disjoint parts work."""

    def work(c: Communicator) -> None:
        store = context_of(c).store
        for size in (4, 4000, 200_000):
            x = store.empty(4 * size) if c.rank == 0 else None
            if c.rank == 0:
                x[...] = 1
                c.send(x, 1, view=True)
                c.send(x, 2, view=True)
                whole = x
            else:
                c.recv(src=0)
                whole = None
            # Ranks 1 and 2 get a writable mapping of the same memory.
            handle = c.broadcast(store.handle(x, writable=True) if c.rank == 0 else None)
            if whole is None:
                whole = store.attach(handle, writable=True)
            with pytest.raises(ValueError, match="ranks 0 and 1 passed overlapping memory"):
                c.all_reduce(whole[c.rank * size // 2 : c.rank * size // 2 + size])
            assert (whole == 1).all()
            c.barrier()
            part = whole[c.rank * size : (c.rank + 1) * size]
            c.all_reduce(part)
            assert (part == 3).all()
            c.barrier()

    ranks(3, work)


@pytest.mark.slow
def test_sizes_in_turn(ranks: Any) -> None:
    """Paths follow each other in any order, more often than there are slots and chunks."""

    def work(c: Communicator) -> None:
        rng = np.random.default_rng(5)
        for i in range(150):
            size = int(rng.choice([0, 1, 900, 3000, 20_000, 150_000]))
            shared = bool(rng.integers(2))
            x = np.full(size, c.rank + 1 + i, "f8")
            y = context_of(c).store.share(x) if shared else x
            c.all_reduce(y, "sum")
            assert (y == sum(range(1, 4)) + 3 * i).all()
            if i % 3 == 0:
                assert c.broadcast(i if c.rank == i % 3 else None, src=i % 3) == i

    ranks(3, work)


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
