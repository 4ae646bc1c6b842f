"""Calls that programs of torch.distributed make, and that its tutorials do not show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import nbparallel as nbp


@pytest.mark.slow
def test_scalars_in_one_tensor(session: nbp.Session) -> None:
    """Tensors of no dimension are gathered into one tensor, and scattered from one."""
    found = session.run(
        """
td.init_process_group()
whole, part = torch.zeros(2), torch.tensor(0.0)
td.all_gather_into_tensor(whole, torch.tensor(rank + 1.0))
td.reduce_scatter_tensor(part, torch.arange(2.0) + rank)
whole.tolist(), part.item()
""",
        namespace={},
    ).values
    assert list(found) == [([1.0, 2.0], 1.0), ([1.0, 2.0], 3.0)]


@pytest.mark.slow
def test_repeated_elements(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """The gradient of a sum, whose elements lie in one place, is reduced in place, as over gloo."""
    values = both(
        session,
        """
class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        assert 0 in gradient.stride()
        td.all_reduce(gradient)
        return gradient

x = torch.ones(2, 3, requires_grad=True)
Reduced.apply(x).sum().backward()
rows = torch.arange(3).bfloat16().expand(2, 3)
td.all_reduce(rows)
x.grad.tolist(), rows.tolist()
""",
    )
    assert values[0] == ([[2.0] * 3] * 2, [[0.0, 2.0, 4.0]] * 2)
    with pytest.raises(nbp.ParallelError, match="contiguous"):
        session.run(
            "x = torch.ones(1).expand(3) if rank else torch.arange(3.0); td.all_reduce(x)", namespace={}
        )


def test_several_tensors_in_one_call(session: nbp.Session) -> None:
    """The group object's operations refuse them: gloo would add a rank's own tensors to each other."""
    found = session.run(
        """
td.init_process_group()
group, x = td.group.WORLD, torch.ones(2)
texts = []
for call in (lambda: group.allreduce([x, x]), lambda: group.broadcast([x, x], 0)):
    try:
        call()
    except ValueError as error:
        texts.append(str(error))
texts
""",
        namespace={},
    ).values
    assert found[0] == [
        "allreduce takes one tensor in a call, not 2: call it for each",
        "broadcast takes one tensor in a call, not 2: call it for each",
    ]


def test_a_second_thread_waits_for_the_same_work(session: nbp.Session) -> None:
    """`wait` and `is_completed` return when the operation has ended, whichever thread runs it."""
    session.push(begun=nbp.zeros(1))
    found = session.run(
        """
import threading, time
from nbparallel.torch_backend.backend_group import deferred
td.init_process_group()
x, seen = torch.ones(4), []
work = td.all_reduce(x, async_op=True)
def other():
    work.wait()
    seen.append(x[0].item())
if rank == 0:
    thread = threading.Thread(target=other)
    thread.start()
    while deferred:  # until the other thread has taken the operation, and waits for rank 1
        time.sleep(0.001)
    begun[0] = 1
    seen.append((work.is_completed(), x[0].item()))
    thread.join()
else:
    while not begun[0]:
        time.sleep(0.001)
    work.wait()
    seen.append(x[0].item())
sorted(map(str, seen))
""",
        namespace={},
    ).values
    assert list(found) == [["(True, 2.0)", "2.0"], ["2.0"]]
    session.run("del begun", namespace={})


def test_futures_hold_a_flat_list(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """The value of a future of all_gather is the list that was filled, as over gloo."""
    both(
        session,
        """
outputs = [torch.zeros(2) for _ in range(2)]
work = td.all_gather(outputs, torch.full((2,), float(td.get_rank())), async_op=True)
[x.tolist() for x in work.get_future().wait()]
""",
    )


def test_a_mesh_begins_the_group(session: nbp.Session) -> None:
    """`init_device_mesh` without `init_process_group` makes the same group; its names are torch's."""
    found = session.run(
        """
td.init_process_group()
td.destroy_process_group()
mesh = td.init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))
x = torch.ones(1)
td.all_reduce(x, group=mesh.get_group("rows"))
named = td.new_group([0, 1], group_desc="pair")
td.get_backend(), x.item(), named.group_desc
""",
        namespace={},
    ).values
    assert list(found) == [("nbparallel", 2.0, "pair")] * 2


def test_functions_that_keep_the_world_of_their_import(session: nbp.Session) -> None:
    """`torch.distributed.nn` has the world as a default: a cell that begins anew and uses it runs again."""
    cell = """
td.init_process_group()
import torch.distributed.nn.functional as functional
x = torch.ones(2, requires_grad=True)
functional.broadcast(x * (rank + 1), 1).tolist()
"""
    for _ in range(2):
        assert list(session.run(cell, namespace={}).values) == [[2.0, 2.0]] * 2


def test_an_operation_that_was_interrupted(
    session: nbp.Session, interrupted: Callable[[nbp.Session, str], None]
) -> None:
    """A later `wait` says that its cell was interrupted; it does not look like another interrupt."""
    session.run("td.init_process_group()", namespace={})
    interrupted(
        session,
        """
import time
work = td.all_reduce(torch.ones(2), async_op=True)
time.sleep(60) if rank == 1 else work.wait()
""",
    )
    with pytest.raises(nbp.ParallelError, match="its cell was interrupted"):
        session.run("work.wait()", namespace={})
    session.run("del work", namespace={})


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["rank=rank, world_size=4", "rank=0, world_size=2"])
def test_a_world_that_cannot_come_about(session: nbp.Session, wrong: str) -> None:
    """A wrong rank or world size is an error: torch would wait for half an hour, and take no interrupt."""
    for backend in ("gloo", "nbparallel"):
        with pytest.raises(nbp.ParallelError, match="leave both out"):
            session.run(f"td.init_process_group({backend!r}, {wrong})", namespace={}, timeout=60)
    session.run("td.init_process_group()", namespace={})


@pytest.mark.slow
def test_the_older_fully_sharded_module(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """FullyShardedDataParallel, which resizes what it has gathered, trains as over gloo."""
    both(
        session,
        """
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), device_id=torch.device("cpu")
)
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(3):
    optimiser.zero_grad()
    loss = model(torch.ones(3, 8) * (td.get_rank() + 1)).square().mean()
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
losses
""",
    )


@pytest.mark.slow
def test_a_checkpoint_in_the_background(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """`async_save` takes the group for one of the CPU."""
    both(
        session,
        """
import shutil, tempfile
import torch.distributed.checkpoint as checkpoint
folder = [tempfile.mkdtemp()] if td.get_rank() == 0 else [None]
td.broadcast_object_list(folder)
checkpoint.async_save({"x": torch.ones(3)}, checkpoint_id=folder[0]).result()
state = {"x": torch.zeros(3)}
checkpoint.load(state, checkpoint_id=folder[0])
td.barrier()
if td.get_rank() == 0:
    shutil.rmtree(folder[0])
state["x"].tolist()
""",
    )
