"""Groups of gloo in cells: what torch itself gets wrong must not end a notebook."""

from __future__ import annotations

import pytest

import nbparallel as nbp

CELL = """
import torch
from torch.nn.parallel import DistributedDataParallel

def step():
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(10, 5))
    model(torch.ones(20, 10)).sum().backward()
    torch.distributed.destroy_process_group()

for _ in range(15):
    step()
"""


@pytest.mark.slow
def test_a_model_is_freed_after_its_group_was_destroyed(four: nbp.Session) -> None:
    """Torch frees a group of gloo with the interpreter's lock held, for which a thread of the group may wait.

    Without a delay one of ten such steps hangs on a busy machine, in torch alone too.
    """
    four.run(CELL, timeout=60)
    assert four.run("torch.distributed.is_initialized()").values == [False] * 4
