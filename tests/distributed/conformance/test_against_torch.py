"""The same calls in torch over gloo, in the same processes: the same values."""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from tests.harness.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: nothing to compare with", allow_module_level=True)


OPERATORS = {
    "f": "SUM AVG MAX MIN PRODUCT",
    "i": "SUM MAX MIN PRODUCT BAND BOR BXOR",
    "b": "MAX MIN BAND BOR",
    "c": "SUM AVG",
}
"""What gloo reduces, by kind of dtype."""
DTYPES = ("f8", "f4", "f2", "i8", "i4", "i1", "u1", "b1", "c8", "c16")


def connect(rank: int, world_size: int, folder: str) -> Any:
    """Return torch.distributed, connected over gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=world_size)
    return dist


@dataclass(slots=True)
class Both:
    """Calls an operation here and in torch, and compares what it filled; of all calls, one of so many."""

    c: Communicator
    theirs: Any
    group: Any
    other: Any
    """The same group, in torch."""
    one_of: int
    turn: int = 0
    compared: int = 0

    def twin(self, x: Any) -> Any:
        """Return torch's copy of an array or a list of arrays."""
        import torch

        if isinstance(x, list):
            return [self.twin(y) for y in x]
        return x if x is None else torch.from_numpy(x.copy())

    def __call__(self, name: str, *arrays: Any, op: str = "", compare: bool = True, **options: Any) -> None:
        """Call it with the same arrays; torch's `ReduceOp` has the operator's name."""
        self.turn += 1
        if self.turn % self.one_of:
            return
        twins = [self.twin(x) for x in arrays]
        ops = {"op": getattr(self.theirs.ReduceOp, op)} if op else {}
        getattr(self.theirs, name)(*twins, group=self.other, **ops, **options)
        if op:
            options["op"] = op.lower()
        getattr(self.c, name)(*arrays, group=self.group, **options)
        for x, twin in zip(arrays, twins, strict=True):
            for mine, his in zip(x, twin, strict=True) if isinstance(x, list) else [(x, twin)]:
                if mine is not None and compare:
                    same = np.allclose if op == "AVG" else np.array_equal  # complex ones
                    assert same(mine, his.numpy()), (name, op, mine.dtype, mine.shape, options)
                    self.compared += 1


def compare(both: Both, dtype: str, size: int) -> None:
    """Call everything for one dtype and size."""
    c = both.c
    members = c.get_process_group_ranks(both.group)
    k, kind = len(members), np.dtype(dtype).kind.replace("u", "i")

    def make(salt: int = 0, rows: int = 0) -> Any:
        shape = (rows, size) if rows else (size,)
        data = (np.arange(int(np.prod(shape))) * 3 + 7 * c.rank + salt) % 5
        return data.astype(dtype).reshape(shape)

    def blank(rows: int = 0) -> Any:
        return np.zeros_like(make(rows=rows))

    both("all_gather", [blank() for _ in range(k)], make())
    both("all_gather_into_tensor", blank(rows=k).reshape(-1), make())
    both("all_to_all_single", blank(rows=k), make(rows=k))
    sizes = {"output_split_sizes": [1] * k, "input_split_sizes": [1] * k}
    both("all_to_all_single", blank(rows=k), make(rows=k), **sizes)
    ops = OPERATORS[kind].split()
    for root in members:
        mine = c.rank == root
        if kind != "c":
            both("gather", make(), [blank() for _ in range(k)] if mine else None, dst=root)
        both("scatter", blank(), [make(r) for r in range(k)] if mine else None, src=root)
        both("broadcast", make(), src=root)
        for op in ops:
            both("reduce", make(1), dst=root, op=op, compare=mine)  # torch leaves partial results elsewhere
    for op in ops:
        both("all_reduce", make(1), op=op)
        both("reduce_scatter", blank(), [make(r) for r in range(k)], op=op)
        both("reduce_scatter_tensor", blank(), make(rows=k).reshape(-1), op=op)


def compare_objects(both: Both) -> None:
    """Gather an object in both."""
    found: list[list[Any]] = [[None] * both.c.get_world_size(both.group) for _ in range(2)]
    both.theirs.all_gather_object(found[0], {"rank": both.c.rank}, group=both.other)
    both.c.all_gather_object(found[1], {"rank": both.c.rank}, group=both.group)
    assert found[0] == found[1] == [{"rank": r} for r in both.c.get_process_group_ranks(both.group)]


def compare_all(c: Communicator, one_of: int) -> int:
    """Compare in one world, with every kind of group; return how many arrays."""
    n, count = c.world_size, 0
    with tempfile.TemporaryDirectory(prefix="nbp-gloo-") if c.rank == 0 else nullcontext() as folder:
        theirs = connect(c.rank, n, c.broadcast(folder))
        kinds = [None, list(range(n)), [0, n - 1], [n - 1]]
        for members in kinds if n > 2 else kinds[:2]:
            other = None if members is None else theirs.new_group(members)
            if members is not None and c.rank not in members:
                continue
            group = None if members is None else c.new_group(members, tag="here")
            both = Both(c, theirs, group, other, one_of)
            for dtype, size in itertools.product(DTYPES, (1, 5000)):
                compare(both, dtype, size)
            compare_objects(both)
            count += both.compared
        c.barrier()
        theirs.destroy_process_group()
    return count


def in_worlds(sizes: Sequence[int], one_of: int) -> list[int]:
    """Compare in worlds of these sizes; return how many arrays a rank has compared in each, at least."""
    import torch  # noqa: F401 - once for all ranks, which are forked from here

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames its own operations
        for n in sizes:
            outcomes = run_ranks(n, lambda c: compare_all(c, one_of), seconds=900)
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
            found.append(min(outcome.value for outcome in outcomes))
    return found


@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("sizes", [(1, 2, 3), (4,)], ids=str)
def test_torchs_own_forms(ranks: Any, sizes: tuple[int, ...]) -> None:
    """Calls written for torch fill the same arrays with the same values, in worlds and groups of all kinds.

    Some of all collectives × operators × dtypes × roots; all of them are in the long runs.
    """
    (found,) = ranks(1, lambda _: in_worlds(sizes, 13), seconds=500)
    assert min(found) > 20


@pytest.mark.stress
@pytest.mark.once
@pytest.mark.time_limit(3600)
def test_all_of_torchs_own_forms(ranks: Any) -> None:
    """All of them."""
    (found,) = ranks(1, lambda _: in_worlds((1, 2, 3, 4), 1), seconds=3000)
    assert min(found) > 500
