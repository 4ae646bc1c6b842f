"""Every operation with tensors: filled in place, and new values arrive as tensors where one was sent."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.sharing.tensors import array_of
from tests.distributed.conformance.cases import ALL, LOCATING, MOVES, REDUCTIONS, Setting, complete, groups
from tests.distributed.conformance.guarded import LAYOUTS, Guards
from tests.distributed.conformance.oracle import OPERATORS, allowed

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: there are no tensors", allow_module_level=True)
import torch

from tests.sharing.tensors.test_arrays_of_others import values_of

DTYPES = ("b1", "u1", "i1", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
LACKING = {"bfloat16": "i2", "float8_e4m3fn": "u1"}
"""Elements that numpy lacks, and as what they are compared."""


class TensorGuards(Guards):
    """Makes tensors over the guarded buffers, as views of `kind` where numpy has no such dtype."""

    kind: str = ""

    def _tensor(self, array: np.ndarray[Any, Any]) -> Any:
        tensor = torch.from_numpy(array)
        return tensor.view(getattr(torch, self.kind)) if self.kind else tensor

    def buffer(self, shape: Any, dtype: Any, layout: str = "private") -> Any:
        """Return a tensor; torch has no negative strides."""
        return self._tensor(super().buffer(shape, dtype, layout.replace("backwards", "strided")))

    def filled(self, x: np.ndarray[Any, Any], layout: str = "private") -> Any:
        """Return a tensor of this content."""
        found = self.buffer(x.shape, x.dtype, layout)
        found.copy_(self._tensor(x.copy()))
        return found

    def input(self, x: np.ndarray[Any, Any], layout: str = "private") -> Any:
        """Return a tensor that must stay as it is."""
        found = self.filled(x, layout)
        self._inputs.append((array_of(found), x.tobytes()))
        return found


class TensorSetting(Setting):
    """A call with tensors."""

    def __post_init__(self) -> None:
        self.guards = TensorGuards(self.c)

    def check(self, x: Any, want: np.ndarray[Any, Any], *, reduced: bool = False) -> None:
        """Assert that it is a tensor of numpy's bits."""
        assert isinstance(x, torch.Tensor)
        super().check(array_of(x).view(want.dtype), want, reduced=reduced)


def run_all(c: Communicator, cases: list[tuple[str, str, str]]) -> None:
    """Run collectives, each with an operator and a dtype, in every kind of group, of every layout in turn."""
    torch.set_num_threads(1)
    turn = 0
    for group, members in groups(c):
        for name, op, dtype in cases:
            turn += 1
            if c.rank not in members:
                continue
            setting = TensorSetting(
                c, group, members, turn % len(members), LACKING.get(dtype, dtype), (7, 0, 1, 1500)[turn % 4],
                op, LAYOUTS[turn % len(LAYOUTS)], later=turn % 3 == 0, salt=turn,
            )  # fmt: skip
            setting.guards.kind = dtype if dtype in LACKING else ""  # type: ignore[attr-defined]
            case = ALL[name](setting)
            complete(case, next(case), setting)


@pytest.mark.slow
def test_values_move_as_tensors() -> None:
    """Of every dtype and layout, in the world and groups, blocking and not; nothing else is written."""
    cases = [(name, "", dtype) for name in (*MOVES, "ring") for dtype in (*DTYPES, *LACKING)]
    values_of(lambda c: run_all(c, cases), 3)


def test_values_are_computed_in_tensors(sampled: Any) -> None:
    """Reductions give what numpy gives for the same numbers, and return the tensor that came in."""
    cases = [(n, op, d) for n in REDUCTIONS for op in OPERATORS for d in DTYPES if allowed(op, d)]
    cases += [(name, "", dtype) for name in LOCATING for dtype in DTYPES[:-2]]
    cases = sampled(cases, one_in=9)
    values_of(lambda c: run_all(c, cases), 3)


def differ(c: Communicator, x: Any, words: str) -> None:
    """Assert that `assert_same` says these words."""
    with pytest.raises(AssertionError, match=words):
        c.assert_same(x)


@pytest.mark.parametrize("dtype", ["float32", "int64", *LACKING])
def test_new_values_are_tensors(dtype: str) -> None:
    """What returns where nothing was passed to be filled; who brings an array among tensors gets an array."""

    def program(c: Communicator) -> None:
        torch.set_num_threads(1)
        me, other = c.rank, 1 - c.rank

        def x(of: int) -> Any:
            return (torch.arange(24) % 3 + of).view(6, 4).to(getattr(torch, dtype)).t()

        mine, both = x(me), [x(0), x(1)]
        calls: dict[str, tuple[Callable[..., Any], list[Any]]] = {
            "all_gather": (lambda **o: c.all_gather(mine, **o), both),
            "gather": (lambda **o: c.gather(mine, dst=0, **o), both if me == 0 else []),
            "scatter": (lambda **o: [c.scatter(both if me == 0 else None, **o)], [x(me)]),
            "its rows": (lambda **o: [c.scatter(mine if me == 0 else None, **o)], [x(0)[2 * me :][:2]]),
            "all_to_all": (lambda **o: c.all_to_all([x(me), x(me + 1)], **o), [x(me), x(me + 1)]),
            "broadcast": (lambda **o: [c.broadcast(x(1) if me else None, src=1, **o)], [x(1)]),
        }
        if dtype != "float8_e4m3fn":
            total = (x(0) + x(1))[2 * me :][:2]
            calls["reduce_scatter"] = (lambda **o: [c.reduce_scatter(mine, **o)], [total])
        received = [c.sendrecv(mine, other, other)]
        c.isend(mine, other)
        found = {"messages": ([*received, c.irecv(src=other).result()], [x(other)] * 2)}
        found |= {name: (call() or [], want) for name, (call, want) in calls.items()}
        (later,) = {call(async_op=True) for name, (call, _) in calls.items() if name == "all_gather"}
        found["later"] = (later.result(), both)
        for name, (values, wanted) in found.items():
            assert len(values) == len(wanted), name
            for y, want in zip(values, wanted, strict=True):
                assert (type(y), y.dtype, y.shape) == (torch.Tensor, want.dtype, want.shape), name
                assert torch.equal(y.float(), want.float()), name
                assert y.data_ptr() != mine.data_ptr()
        kinds = [type(y) for y in c.all_gather(array_of(mine) if me else mine)]
        assert kinds == [torch.Tensor, np.ndarray]
        c.assert_same({"w": [x(0)]})
        differ(c, {"w": [mine]}, r"\['w'\]")
        differ(c, array_of(x(0)) if me else x(0), "Tensor")
        if dtype == "bfloat16":
            with pytest.raises(TypeError, match="real numbers"):
                c.maxloc(mine)

    values_of(program)
