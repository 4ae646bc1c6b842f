"""assert_same is silent if all ranks hold equal data, and says the same on every rank if they do not."""

from __future__ import annotations

import threading
from collections import ChainMap, OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.api.data_parallel import AssertSame
from nbparallel.distributed.equality.difference import CHUNK, MAX_CHUNKS
from nbparallel.errors import (
    DifferentDataError,
    NbParallelError,
    UnpicklableError,
)
from tests.distributed.conformance.cases import NUMERIC, OTHERS, content
from tests.harness.ranks import context_of


class Model:
    """Something with arrays inside."""

    def __init__(self, weights: Any) -> None:
        self.weights, self.name = weights, "model"


class Point(NamedTuple):
    """A tuple with names."""

    x: Any
    y: Any


class Slots:
    """Something with slots."""

    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


def message(c: AssertSame, x: Any, **options: Any) -> str:
    """Return what `assert_same` says, empty if it is silent."""
    try:
        c.assert_same(x, **options)
    except DifferentDataError as error:
        return str(error).removeprefix("not all ranks hold the same data: ")
    return ""


def on_all(values: list[list[str]]) -> list[str]:
    """Return what one rank said, which is what all have."""
    assert all(value == values[0] for value in values[1:]), values
    return values[0]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.time_limit(60)
def test_equal_data(ranks: Any, n: int) -> None:
    """Equal data of every kind are the same, whatever the layout, the order of keys, and who owns it."""

    def work(c: Communicator) -> list[str]:
        x = np.arange(60.0).reshape(3, 4, 5)
        strided = np.zeros((3, 8, 5))[:, ::2]
        strided[...] = x
        frozen = x.copy()
        frozen.flags.writeable = False
        shared = context_of(c).store.share(x)
        nan = np.array([-np.nan, 1.0]) if c.rank else np.array([np.nan, 1.0])
        nan.view(np.uint64)[0] ^= np.uint64(c.rank)  # another NaN on every rank
        items = {"w": x, "b": nan, 3: [1, 2.5, "three", None]}
        values: list[Any] = [
            [x, np.asfortranarray(x), strided, frozen][c.rank % 4],
            shared if c.rank % 2 else x,
            nan,
            nan * 1j,
            np.array([(1, nan[0])], "i1,f8"),
            float("-nan") if c.rank else float("nan"),
            dict(items if c.rank else reversed(items.items())),
            {f"word {i}" for i in (range(50) if c.rank else reversed(range(50)))},
            Model(x.copy()), Model, len, np, np.float32(0.1), 7**3000, "long" * 100, b"",
            [x, x] if c.rank else [x, x.copy()], np.array([[1, "a"], [None, x]], object),
            np.ma.array([1.0, 2.0], mask=[0, 1]), Path("/tmp"), range(3), np.zeros((0, 3)), np.array(5),
            np.zeros(3, "V0"), np.array(["2020", "NaT"], "M8[D]"), np.longdouble(1) / 3,
            [True] * 20, list(range(100)), [0.5] * 100, [2**70] * 20, (1, (2, {3})), OrderedDict(a=1),
            np.random.default_rng(3), np.random.default_rng(3).normal(size=400_000),
            {"a": x}.keys(), {"a": x}.items(), OrderedDict(a=x, b=1).keys(), OrderedDict(a=x).values(),
            ChainMap({"a": x}).items(), MappingProxyType(items),
        ]  # fmt: skip
        values += [content(dtype, 50, 1, 0) for dtype in NUMERIC + OTHERS]
        return [f"{i}: {text}" for i, value in enumerate(values) if (text := message(c, value))]

    assert on_all(ranks(n, work, seconds=50)) == []


@pytest.mark.time_limit(60)
def test_who_differs_and_where(ranks: Any) -> None:
    """The message names who agrees, and for the others the first place, both values and how many differ."""

    def work(c: Communicator) -> list[str]:
        x = np.full((10, 10), 0.2)
        if c.rank == 2:
            x[3, 5], x[4, :], x[5, :6] = 0.1, 0.7, np.inf
        y = x.copy()
        if c.rank == 2:
            y[5] = 0.2
        pair = c.rank // 2
        return [
            message(c, x),
            message(c, y.T.copy().T if c.rank == 0 else y),
            message(c, {"w": [x]} if c.rank else {"w": [x.copy()]}),
            message(c, Model(x)),
            message(c, x.astype("f4" if c.rank == 1 else "f8")[:1]),
            message(c, x[: 1 + pair]),
            message(c, pair),
            message(c, c.rank),
            message(c, 1 if c.rank else True),
            message(c, np.float32(0.1) if c.rank != 3 else np.float32(0.25)),
            message(c, {"w": 1, "b": 2} if c.rank != 1 else {"w": 1}),
            message(c, [*range(40), pair]),
            message(c, "x" * 70 + str(pair)),
            message(c, "ab"[pair]),
            message(c, np.array([(1, 2.0), (3, pair)], "i4,f8")),
            message(c, -0.0 if c.rank == 1 else 0.0),
            message(c, [1, [2, np.array([1, pair, None], object)]]),
            message(c, [print, Model, lambda: 1][: 1 + pair]),
            message(c, {1, 2, pair + 3}),
            message(c, np.array(["aa", "bb"][pair:] * 2)[:2]),
            message(c, [Point(1, pair), Slots(1, np.ones(3))]),
            message(c, [Point(1, 2), Slots(pair, np.ones(3))]),
            message(c, {"k" * 99: [np.random.default_rng(0).bit_generator.state, pair]}),
            message(c, np.ma.array([1, 2], mask=[0, pair])),
        ]

    said = on_all(ranks(4, work, seconds=50))
    form = "float64 array of shape"
    zero = ".0" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "."  # as numpy writes a structure
    assert said == [
        "ranks 0-1, 3 agree; rank 2 differs at [3, 5]: 0.1 instead of 0.2 (17 of 100 elements)",
        "ranks 0-1, 3 agree; rank 2 differs at [3, 5]: 0.1 instead of 0.2 (11 of 100 elements, at most 0.5 "
        "apart)",
        "ranks 0-1, 3 agree; rank 2 differs at ['w'][0][3, 5]: 0.1 instead of 0.2 (17 of 100 elements)",
        "ranks 0-1, 3 agree; rank 2 differs at .weights[3, 5]: 0.1 instead of 0.2 (17 of 100 elements)",
        f"ranks 0, 2-3 agree; rank 1 differs: float32 array of shape (1, 10) instead of {form} (1, 10)",
        f"ranks 0-1 agree; ranks 2-3 differ: {form} (2, 10) instead of {form} (1, 10)",
        "ranks 0-1 agree; ranks 2-3 differ: int 1 instead of int 0",
        "rank 1 differs from rank 0: int 1 instead of int 0; "
        "rank 2 differs from rank 0: int 2 instead of int 0; "
        "rank 3 differs from rank 0: int 3 instead of int 0",
        "ranks 1-3 agree; rank 0 differs: bool True instead of int 1",
        "ranks 0-2 agree; rank 3 differs: 0.25 instead of 0.1",
        "ranks 0, 2-3 agree; rank 1 differs: dict of 1 with 'w' instead of dict of 2 with 'b', 'w'",
        "ranks 0-1 agree; ranks 2-3 differ at [40]: 1 instead of 0 (1 of 41 elements)",
        "ranks 0-1 agree; ranks 2-3 differ at [70]: '1' instead of '0' (1 of 71 elements)",
        "ranks 0-1 agree; ranks 2-3 differ: str 'b' instead of str 'a'",
        f"ranks 0-1 agree; ranks 2-3 differ at [1]: (3, 1{zero}) instead of (3, 0{zero}) (1 of 2 elements)",
        "ranks 0, 2-3 agree; rank 1 differs: float -0.0 instead of float 0.0",
        "ranks 0-1 agree; ranks 2-3 differ at [1][1][1]: int 1 instead of int 0",
        "ranks 0-1 agree; ranks 2-3 differ: list of 2 instead of list of 1",
        "ranks 0-1 agree; ranks 2-3 differ: set of 3 instead of set of 3",
        "ranks 0-1 agree; ranks 2-3 differ at [0]: 'bb' instead of 'aa' (1 of 2 elements)",
        "ranks 0-1 agree; ranks 2-3 differ at [0][1]: int 1 instead of int 0",
        "ranks 0-1 agree; ranks 2-3 differ at [1].first: int 1 instead of int 0",
        f"ranks 0-1 agree; ranks 2-3 differ at ['{'k' * 48}…][1]: int 1 instead of int 0",
        r"ranks 0-1 agree; ranks 2-3 differ at (state)[5]: bytes b'\x00\x01' instead of bytes b'\x00\x00'",
    ]


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.time_limit(60)
def test_only_what_differs_travels(ranks: Any, n: int) -> None:
    """Of large arrays no byte travels while they are equal, and else only the chunks that differ."""

    def work(c: Communicator) -> tuple[str, list[int]]:
        x = np.zeros((5000, 600))
        x = context_of(c).store.share(x) if c.rank else x
        moved = []

        def compare(value: Any) -> str:
            before = context_of(c).nbytes
            text = message(c, value)
            moved.append(context_of(c).nbytes - before)
            return text

        assert compare(x) == ""
        if c.rank == 1:
            x[1000, 500], x[4999, 599] = 3.0, np.nan
        return compare(x), moved

    for text, (equal, different) in ranks(n, work, seconds=50):
        first = "ranks 0, 2 agree; rank 1 differs" if n == 3 else "rank 1 differs from rank 0"
        assert text == f"{first} at [1000, 500]: 3.0 instead of 0.0 (2 of 3000000 elements)"
        assert equal < 1000
        assert different < 2 * CHUNK + 10_000


def test_much_that_differs(ranks: Any) -> None:
    """Of an array that differs all over a bounded part travels, and the message says that it is a part."""

    def work(c: Communicator) -> tuple[str, int]:
        before = context_of(c).nbytes
        return message(c, np.full(40 * CHUNK // 8, float(c.rank))), context_of(c).nbytes - before

    for text, moved in ranks(2, work, seconds=50):
        count, size = MAX_CHUNKS * CHUNK // 8, 40 * CHUNK // 8
        assert text == (
            f"rank 1 differs from rank 0 at [0]: 1.0 instead of 0.0 (at least {count} of {size} elements, "
            "at most 1 apart)"
        )
        assert moved < 2 * MAX_CHUNKS * CHUNK


def test_groups_and_after(ranks: Any) -> None:
    """It works in a group, names ranks of the world, and finishes what was begun before it."""

    def work(c: Communicator) -> tuple[str, Any]:
        odd = c.new_group([1, 3])
        begun = c.all_reduce(c.rank, async_op=True)
        said = (
            message(c, c.rank, group=odd) if c.rank in odd.ranks else message(c, 1, group=c.new_group([0, 2]))
        )
        with pytest.raises(DifferentDataError) as caught:
            c.assert_same(c.rank % 2)
        assert begun.result() == 6
        return said, caught.value.groups

    one, other = (
        ("", ((0, 2), (1, 3))),
        ("rank 3 differs from rank 1: int 3 instead of int 1", ((0, 2), (1, 3))),
    )
    assert ranks(4, work) == [one, other] * 2


async def endless() -> AsyncIterator[int]:
    """Be something that no pickle takes."""
    yield 1


def test_what_cannot_be_compared(ranks: Any) -> None:
    """Something that cannot be taken apart is an error of the caller alone, which says what and where."""

    def work(c: Communicator) -> str:
        deep: list[Any] = []
        for _ in range(300):
            deep = [deep]
        loop: list[Any] = [1]
        loop.append(loop)
        c.assert_same(loop)
        for view in ("keys", "items", "values"):
            with pytest.raises(DifferentDataError, match=r"instead of"):
                c.assert_same(getattr(OrderedDict({"a": 1, c.rank: c.rank}), view)())
        for x, words in (
            ({"a": [threading.Lock()]}, r"a _thread.lock at \['a'\]\[0\]"),
            (deep, "150 deep"),
            (endless(), "^an async_generator cannot"),
        ):
            with pytest.raises(UnpicklableError, match=words):
                c.assert_same(x)
        return str(c.all_reduce(1))

    assert ranks(2, work) == ["2", "2"]


def test_many_groups(ranks: Any) -> None:
    """Of more than eight groups the last are only named."""
    said = on_all(ranks(11, lambda c: [message(c, np.full(3, max(1, c.rank)))]))[0]
    assert "ranks 0-1 agree; rank 2 differs at [0]: 2 instead of 1 (3 of 3 elements); rank 3" in said
    assert said.endswith("rank 9 differs at [0]: 9 instead of 1 (3 of 3 elements); so does rank 10")


def test_the_error_is_one_of_ours() -> None:
    """It derives from what `assert` raises, and travels."""
    import pickle

    error = pickle.loads(pickle.dumps(DifferentDataError("why", groups=((0,), (1, 2)))))
    assert isinstance(error, NbParallelError)
    assert isinstance(error, AssertionError)
    assert error.groups == ((0,), (1, 2))
