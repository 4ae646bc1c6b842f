"""The same calls in torch over gloo, in the same processes: the same values."""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
import warnings
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: nothing to compare with", allow_module_level=True)


def connect(rank: int, world_size: int, folder: str) -> Any:
    """Return torch.distributed, connected over gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=world_size)
    return dist


class Both:
    """Calls an operation here and in torch, and compares what it filled."""

    def __init__(self, c: Communicator, theirs: Any, group: Any, other: Any) -> None:
        self.c, self.theirs, self.group, self.other = c, theirs, group, other
        self.compared = 0

    def twin(self, x: Any) -> Any:
        """Return torch's copy of an array or a list of arrays."""
        import torch

        if isinstance(x, list):
            return [self.twin(y) for y in x]
        return x if x is None else torch.from_numpy(x.copy())

    def __call__(self, name: str, *arrays: Any, op: str = "", compare: bool = True, **options: Any) -> None:
        """Call it with the same arrays; torch's `ReduceOp` has the operator's name."""
        twins = [self.twin(x) for x in arrays]
        ops = {"op": getattr(self.theirs.ReduceOp, op)} if op else {}
        getattr(self.theirs, name)(*twins, group=self.other, **ops, **options)
        if op:
            options["op"] = op.lower()
        getattr(self.c, name)(*arrays, group=self.group, **options)
        for x, twin in zip(arrays, twins, strict=True):
            for mine, his in zip(x, twin, strict=True) if isinstance(x, list) else [(x, twin)]:
                if mine is not None and compare:
                    assert np.array_equal(mine, his.numpy()), (name, mine.dtype, mine.shape)
                    self.compared += 1


def compare(both: Both, dtype: str, size: int) -> None:
    """Call everything for one dtype and size."""
    c = both.c
    members = c.get_process_group_ranks(both.group)
    k, integers = len(members), np.dtype(dtype).kind in "iu"

    def make(salt: int = 0, rows: int = 0) -> Any:
        shape = (rows, size) if rows else (size,)
        data = (np.arange(int(np.prod(shape))) * 3 + 7 * c.rank + salt) % 5
        return data.astype(dtype).reshape(shape)

    both("all_gather", [make() * 0 for _ in range(k)], make())
    both("all_gather_into_tensor", make(rows=k).reshape(-1) * 0, make())
    both("all_to_all_single", make(rows=k) * 0, make(rows=k))
    sizes = {"output_split_sizes": [1] * k, "input_split_sizes": [1] * k}
    both("all_to_all_single", make(rows=k) * 0, make(rows=k), **sizes)
    ops = ("SUM", "MAX", "MIN", "PRODUCT", *(("BAND", "BOR", "BXOR") if integers else ("AVG",)))
    for root in members:
        mine = c.rank == root
        both("gather", make(), [make() * 0 for _ in range(k)] if mine else None, dst=root)
        both("scatter", make() * 0, [make(r) for r in range(k)] if mine else None, src=root)
        both("broadcast", make(), src=root)
        for op in ops[:4] if size == 1 else ops[:1]:
            both("reduce", make(1), dst=root, op=op, compare=mine)  # torch leaves partial results elsewhere
    for op in ops:
        both("all_reduce", make(1), op=op)
        if op != "AVG" and (size == 1 or op in ops[:4]):
            both("reduce_scatter", make() * 0, [make(r) for r in range(k)], op=op)


@pytest.mark.time_limit(600)
def test_torchs_own_forms(ranks: Any) -> None:
    """Calls written for torch fill the same arrays with the same values, in the world and in a group."""
    with tempfile.TemporaryDirectory(prefix="nbp-gloo-") as folder:

        def work(c: Communicator) -> int:
            theirs = connect(c.rank, 3, folder)
            world = Both(c, theirs, None, None)
            pair = Both(c, theirs, c.new_group([0, 2]), theirs.new_group([0, 2]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch renames its own operations
                for dtype, size in itertools.product(("f8", "f4", "i8", "i4", "u1"), (1, 5000)):
                    compare(world, dtype, size)
                    if c.rank in (0, 2):
                        compare(pair, dtype, size)
            for both in (world, pair) if c.rank != 1 else (world,):
                found: list[list[Any]] = [[None] * c.get_world_size(both.group) for _ in range(2)]
                both.theirs.all_gather_object(found[0], {"rank": c.rank}, group=both.other)
                c.all_gather_object(found[1], {"rank": c.rank}, group=both.group)
                assert found[0] == found[1]
            theirs.destroy_process_group()
            return world.compared

        assert min(ranks(3, work, seconds=500)) > 300
