"""Every operation with tensors: filled in place, and new values arrive as tensors where one was sent."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.sharing.tensors import array_of
from tests.harness.ranks import context_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: there are no tensors", allow_module_level=True)
import torch

from tests.sharing.tensors.test_arrays_of_others import values_of

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "bool", "int8", "int64", "complex64", "uint8",
    "float8_e4m3fn",
)  # fmt: skip
MOVED_ONLY = ("float8_e4m3fn",)
LAYOUTS = ("contiguous", "strided", "transposed", "0-d", "empty", "shared", "large", "large shared")
SHAPES = {"0-d": (), "empty": (0, 3), "large": (600, 300), "large shared": (600, 300)}
MEMBERS = ((0, 1, 2), (0, 2))


@dataclass
class Case:
    """One rank's part of one combination."""

    c: Communicator
    dtype: str
    layout: str
    members: tuple[int, ...]
    async_op: bool

    def __post_init__(self) -> None:
        self.index, self.n = self.members.index(self.c.rank), len(self.members)
        self.options: dict[str, Any] = {}
        if len(self.members) < self.c.world_size:
            self.options["group"] = self.c.new_group(self.members)
        self.shape = SHAPES.get(self.layout, (6, 4))
        self.now: dict[str, Any] = {"async_op": True} if self.async_op else {}

    def values(self, member: int, *, shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
        """Return what a member brings, as numbers that every dtype holds exactly, and so their sums."""
        shape = self.shape if shape is None else shape
        count = int(np.prod(shape))
        x = (np.arange(count) % 3 + member).reshape(shape)
        if self.dtype == "bool":
            return np.asarray(x % 2 == 1)
        return x.astype("c8" if "complex" in self.dtype else "f8")

    def tensor(self, member: int, *, shape: tuple[int, ...] | None = None) -> Any:
        """Return it as a tensor of this layout."""
        values = torch.from_numpy(self.values(member, shape=shape)).to(getattr(torch, self.dtype))
        return self.laid_out(values)

    def laid_out(self, values: Any) -> Any:
        """Return a copy of a tensor in this layout."""
        if self.layout == "strided" and values.ndim:
            memory = torch.zeros([2 * n + 1 for n in values.shape], dtype=values.dtype)
            place = memory[tuple(slice(1, None, 2) for _ in values.shape)]
        elif self.layout == "transposed" and values.ndim > 1:
            place = torch.zeros(values.shape[::-1], dtype=values.dtype).permute(*range(values.ndim)[::-1])
        elif "shared" in self.layout:
            octets = context_of(self.c).store.zeros((values.numel() * values.element_size(),), np.uint8)
            place = torch.from_numpy(octets).view(values.dtype).view(values.shape)
        else:
            return values.clone()
        with torch.no_grad():
            place.copy_(values)
        return place

    def result(self, found: Any) -> Any:
        """Return what an operation returned, or its work's result."""
        return found.result() if self.async_op else found

    def same(self, found: Any, expected: np.ndarray[Any, Any]) -> None:
        """Check a tensor's dtype and values."""
        assert isinstance(found, torch.Tensor), type(found)
        assert found.dtype == getattr(torch, self.dtype)
        assert tuple(found.shape) == expected.shape
        values = found.to(torch.complex128).numpy()
        assert np.array_equal(values, expected.astype("c16")), (values.ravel()[:8], expected.ravel()[:8])


def _sum(k: Case, members: Any) -> np.ndarray[Any, Any]:
    return combined(np.add, [k.values(m) for m in members])


def combined(ufunc: Any, values: Any) -> np.ndarray[Any, Any]:
    """Return the combination of arrays in their own dtype."""
    return np.asarray(functools.reduce(ufunc, values))


def all_reduce(k: Case) -> None:
    """Check: reduced in place, and returned."""
    for op, ufunc in (("sum", np.add), ("max", np.maximum), ("product", np.multiply)):
        if op == "max" and "complex" in k.dtype:
            continue
        x = k.tensor(k.index)
        assert k.result(k.c.all_reduce(x, op, **k.options, **k.now)) is x
        k.same(x, combined(ufunc, [k.values(m) for m in range(k.n)]))


def reduce(k: Case) -> None:
    """Check: filled on the destination alone."""
    x = k.tensor(k.index)
    found = k.result(k.c.reduce(x, k.members[-1], **k.options, **k.now))
    last = k.index == k.n - 1
    assert (found is x) if last else (found is None)
    k.same(x, _sum(k, range(k.n)) if last else k.values(k.index))


def reduce_scatter(k: Case) -> None:
    """Check: a new tensor, or the one that was passed."""
    if k.shape == ():
        return
    x = k.tensor(k.index)
    rows = np.array_split(_sum(k, range(k.n)), k.n)[k.index]
    k.same(k.result(k.c.reduce_scatter(x, **k.options, **k.now)), rows)
    k.same(x, k.values(k.index))
    parts = [k.tensor(k.index + i) for i in range(k.n)]
    expected = combined(np.add, [k.values(m + k.index) for m in range(k.n)])
    k.same(k.result(k.c.reduce_scatter(parts, **k.options, **k.now)), expected)
    output = k.laid_out(torch.zeros_like(parts[0]))
    assert k.result(k.c.reduce_scatter(output, parts, **k.options, **k.now)) is output
    k.same(output, expected)
    whole = k.tensor(k.index, shape=(k.n, *k.shape))
    assert k.result(k.c.reduce_scatter_tensor(output, whole, **k.options, **k.now)) is output
    k.same(output, combined(np.add, [k.values(m, shape=(k.n, *k.shape))[k.index] for m in range(k.n)]))


def scan(k: Case) -> None:
    """Check: in place; `exscan` returns None on the first member."""
    x = k.tensor(k.index)
    assert k.result(k.c.scan(x, **k.options, **k.now)) is x
    k.same(x, _sum(k, range(k.index + 1)))
    x = k.tensor(k.index)
    found = k.result(k.c.exscan(x, **k.options, **k.now))
    assert found is (x if k.index else None)
    k.same(x, _sum(k, range(k.index)) if k.index else k.values(0))


def maxloc(k: Case) -> None:
    """Check: two new tensors."""
    if "complex" in k.dtype or k.dtype == "bfloat16":
        with pytest.raises(TypeError, match="real numbers"):
            k.c.maxloc(k.tensor(0), **k.options)
        return
    value, where = k.result(k.c.maxloc(k.tensor(k.index), k.index, **k.options, **k.now))
    brought = np.array([k.values(m) for m in range(k.n)])
    k.same(value, brought.max(axis=0))
    assert where.dtype == torch.int64
    assert np.array_equal(where.numpy(), brought.argmax(axis=0))
    places = torch.full(k.shape, k.index)
    value, other = k.result(k.c.minloc(k.tensor(k.index), places, **k.options, **k.now))
    k.same(value, brought.min(axis=0))
    assert np.array_equal(other.numpy(), brought.argmin(axis=0))


def broadcast(k: Case) -> None:
    """Check: filled, or new where None was passed."""
    root = k.members[1]
    x = k.tensor(k.index)
    assert k.result(k.c.broadcast(x, root, **k.options, **k.now)) is x
    k.same(x, k.values(1))
    mine = k.index == 1
    found = k.result(k.c.broadcast(x if mine else None, root, **k.options, **k.now))
    k.same(found, k.values(1))
    assert (found is x) == mine


def gather(k: Case) -> None:
    """Check: new tensors, copies; or the ones that were passed, in their list."""
    x = k.tensor(k.index)
    for values in (k.result(k.c.all_gather(x, **k.options, **k.now)),
                   k.result(k.c.gather(x, dst=k.members[0], **k.options, **k.now))):  # fmt: skip
        if values is not None:
            for m, value in enumerate(values):
                k.same(value, k.values(m))
                assert value.data_ptr() != x.data_ptr() or not x.numel()
    outputs = [k.laid_out(torch.zeros_like(x)) for _ in range(k.n)]
    assert k.result(k.c.all_gather(outputs, x, **k.options, **k.now)) is outputs
    for m, output in enumerate(outputs):
        k.same(output, k.values(m))
    first = k.index == 0
    found = k.result(k.c.gather(x, outputs[::-1] if first else None, k.members[0], **k.options, **k.now))
    if first:
        for m, output in enumerate(found):
            k.same(output, k.values(m))
            assert output is outputs[k.n - 1 - m]
    together = k.laid_out(torch.zeros((k.n, *k.shape), dtype=x.dtype))
    assert k.result(k.c.all_gather_into_tensor(together, x, **k.options, **k.now)) is together
    k.same(together, np.array([k.values(m) for m in range(k.n)]))


def scatter(k: Case) -> None:
    """Check: new, or filled; of a tensor its parts along axis 0."""
    mine = k.index == 0
    parts = [k.tensor(m) for m in range(k.n)]
    k.same(k.result(k.c.scatter(parts if mine else None, src=0, **k.options, **k.now)), k.values(k.index))
    output = k.laid_out(torch.zeros_like(parts[0]))
    assert k.result(k.c.scatter(output, parts if mine else None, 0, **k.options, **k.now)) is output
    k.same(output, k.values(k.index))
    if k.shape:
        x = k.tensor(0)
        part = k.result(k.c.scatter(x if mine else None, **k.options, **k.now))
        k.same(part, np.array_split(k.values(0), k.n)[k.index])


def all_to_all(k: Case) -> None:
    """Check: new, or filled; and in one tensor."""
    parts = [k.tensor(k.index + i) for i in range(k.n)]
    for m, value in enumerate(k.result(k.c.all_to_all(parts, **k.options, **k.now))):
        k.same(value, k.values(m + k.index))
    outputs = [k.laid_out(torch.zeros_like(parts[0])) for _ in range(k.n)]
    assert k.result(k.c.all_to_all(outputs, parts, **k.options, **k.now)) is outputs
    for m, output in enumerate(outputs):
        k.same(output, k.values(m + k.index))
    shape = (k.n, *k.shape)
    x, y = k.tensor(k.index, shape=shape), k.laid_out(torch.zeros(shape, dtype=parts[0].dtype))
    assert k.result(k.c.all_to_all_single(y, x, **k.options, **k.now)) is y
    k.same(y, np.array([k.values(m, shape=shape)[k.index] for m in range(k.n)]))


def messages(k: Case) -> None:
    """Check: new, or filled; to itself too."""
    right, left = k.members[(k.index + 1) % k.n], k.members[k.index - 1]
    x = k.tensor(k.index)
    source = (k.index - 1) % k.n
    k.same(k.c.sendrecv(x, right, left, **k.options), k.values(source))
    y = k.laid_out(torch.zeros_like(x))
    assert k.c.sendrecv(x, right, left, output=y, **k.options) is y
    k.same(y, k.values(source))
    if k.async_op:
        works = [k.c.isend(x, right, **k.options), k.c.irecv(None, left, **k.options)]
        k.same(works[1].result(), k.values(source))
        y.zero_()
        works += [k.c.isend(x, right, **k.options), k.c.irecv(y, left, **k.options)]
        assert works[3].result() is y
        k.same(y, k.values(source))
    else:
        k.c.isend(x, right, **k.options)
        k.same(k.c.recv(src=left, **k.options), k.values(source))
        k.c.isend(x, right, **k.options)
        assert k.c.recv(y, left, **k.options) == left
    k.c.isend(x, k.c.rank, **k.options)
    k.same(k.c.recv(src=k.c.rank, **k.options), k.values(k.index))
    k.same(x, k.values(k.index))


def mixed(k: Case) -> None:
    """One member brings a tensor and the others arrays of numpy: the same values, each in its own kind."""
    x = k.tensor(k.index)
    brought = x if k.index == 0 else array_of(x)
    values = k.result(k.c.all_gather(brought, **k.options, **k.now))
    assert [isinstance(value, torch.Tensor) for value in values] == [True] + [False] * (k.n - 1)
    assert k.result(k.c.broadcast(brought, **k.options, **k.now)) is brought
    k.same(x, k.values(0))
    if k.dtype not in MOVED_ONLY:
        k.result(k.c.all_reduce(brought, **k.options, **k.now))
        k.same(x, combined(np.add, [k.values(0)] * k.n))


def same(k: Case) -> None:
    """Check: equal tensors are the same; others differ where they do, and from arrays by their type."""
    k.c.assert_same({"w": [k.tensor(0)]}, **k.options)
    if k.shape != (0, 3):
        with pytest.raises(AssertionError, match=r"\['w'\]"):
            k.c.assert_same({"w": [k.tensor(k.index)]}, **k.options)
    with pytest.raises(AssertionError, match="Tensor"):
        k.c.assert_same(k.tensor(0) if k.index else array_of(k.tensor(0)), **k.options)


MOVING = (broadcast, gather, scatter, all_to_all, messages, mixed, same)
COMPUTING = (all_reduce, reduce, reduce_scatter, scan, maxloc)


def _run(operation: Callable[[Case], None], dtype: str) -> None:
    def program(c: Communicator) -> None:
        torch.set_num_threads(1)
        for layout, members, async_op in itertools.product(LAYOUTS, MEMBERS, (False, True)):
            if c.rank not in members or (async_op and operation is same):
                continue
            try:
                operation(Case(c, dtype, layout, members, async_op))
            except Exception as error:
                error.add_note(f"{layout}, {members}, async_op={async_op}\n{traceback.format_exc()}")
                raise

    values_of(program, 3)


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", MOVING)
def test_values_move_as_tensors(operation: Callable[[Case], None], dtype: str) -> None:
    """Of every dtype and layout, in the world and a group, blocking and not: tensors come as tensors."""
    _run(operation, dtype)


@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in MOVED_ONLY])
@pytest.mark.parametrize("operation", COMPUTING)
def test_values_are_computed_in_tensors(operation: Callable[[Case], None], dtype: str) -> None:
    """Reductions give what numpy gives for the same numbers, and return the tensor that came in."""
    _run(operation, dtype)
