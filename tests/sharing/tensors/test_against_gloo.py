"""bfloat16 reduced here and by torch over gloo: the same bits."""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
import warnings

import pytest

from nbparallel.distributed import Communicator
from tests.sharing.tensors.test_arrays_of_others import values_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: nothing to compare with", allow_module_level=True)
import torch
import torch.distributed as gloo


def compare(folder: str, c: Communicator) -> int:
    """Reduce the same tensors both ways; return how many were compared."""
    warnings.simplefilter("ignore", FutureWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    at = f"file://{folder}/gloo"
    gloo.init_process_group("gloo", init_method=at, rank=c.rank, world_size=c.world_size)
    torch.manual_seed(c.rank)
    compared = 0
    for size in (1, 100, 300_000):
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            mine = torch.randn(size).bfloat16()
            twin = mine.clone()
            gloo.all_reduce(twin, op=getattr(gloo.ReduceOp, op))
            for x in (mine.clone(), mine.repeat_interleave(2)[::2]):
                assert torch.equal(c.all_reduce(x, op.lower()), twin), (size, op)
                compared += 1
            assert torch.equal(c.all_reduce(mine, op.lower(), async_op=True).result(), twin), (size, op)
    gloo.destroy_process_group()
    return compared


def test_bfloat16_is_reduced_to_the_bits_that_gloo_gives() -> None:
    """Of two ranks' values, for which no order is possible but one."""
    with tempfile.TemporaryDirectory() as folder:
        assert values_of(functools.partial(compare, folder)) == [24, 24]
