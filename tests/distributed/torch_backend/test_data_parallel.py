"""DistributedDataParallel over our memory trains as over gloo: the same losses and weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import nbparallel as nbp

TRAIN = '''
import contextlib
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Branches(nn.Module):
    """A model with a branch that some steps leave out, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.left, self.right = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x, both):
        x = torch.relu(self.norm(self.first(x)))
        return self.left(x) + self.right(x) if both else self.left(x)


def train(optimiser, *, steps=4, accumulate=1, uneven=False, unused=False, bucket=0.001, **options):
    """Return losses and weights of a training."""
    torch.manual_seed(1)
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=bucket, find_unused_parameters=unused, **options)
    opt = getattr(torch.optim, optimiser)(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(10 + td.get_rank())
    losses = []
    count = steps + td.get_rank() if uneven else steps
    with ddp.join() if uneven else contextlib.nullcontext():
        for step in range(count):
            opt.zero_grad()
            for part in range(accumulate):
                last = part == accumulate - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    x = torch.randn(8, 6, generator=generator)
                    y = torch.randint(0, 3, (8,), generator=generator)
                    loss = nn.functional.cross_entropy(ddp(x, not unused or step % 2 == 0), y)
                    loss.backward()
                    losses.append(loss.item())
            opt.step()
    weights = [p.detach().numpy().tobytes() for p in ddp.parameters()]
    return losses, weights


'''
CHOICES = {
    "buckets": "train('SGD')",
    "one bucket": "train('SGD', bucket=25)",
    "AdamW": "train('AdamW', gradient_as_bucket_view=True)",
    "RMSprop": "train('RMSprop', static_graph=True)",
    "accumulation": "train('SGD', accumulate=3)",
    "unused": "train('SGD', unused=True)",
    "uneven": "train('SGD', uneven=True)",
}


@pytest.mark.slow
def test_gradients_compressed_in_halves(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """Torch's hook that sends gradients as halves, and its built-in one that does not, give gloo's."""
    values = both(
        session,
        """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def gradient(register):
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(5, 4))
    register(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((2, 5), rank + 0.3)).square().sum().backward()
    return model.module.weight.grad.numpy().tobytes()


(
    gradient(lambda model: model._register_builtin_comm_hook(td.BuiltinCommHookType.ALLREDUCE)),
    gradient(lambda model: model.register_comm_hook(None, fp16_compress_hook)),
)
""",
    )
    whole, compressed = values[0]
    assert compressed != whole


def test_training_as_over_gloo(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """Buckets and gradient accumulation with no_sync: losses and weights are gloo's."""
    values = both(session, f"{TRAIN}[{CHOICES['buckets']}, {CHOICES['accumulation']}]")
    assert values[0][0][1] == values[1][0][1], "the ranks have equal weights"
    assert values[0][0][0] != values[1][0][0], "and other data"


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_all_kinds_of_training(session: nbp.Session, both: Callable[..., list[object]], choice: str) -> None:
    """The same for three optimisers, unused parameters, uneven inputs, static graphs and views of buckets."""
    both(session, f"{TRAIN}{CHOICES[choice]}")


@pytest.mark.slow
def test_hooks_of_communication(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """Hooks that compress gradients or chain futures get what they get over gloo."""
    both(
        session,
        TRAIN
        + """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

def own(state, bucket):
    work = td.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / 4)

def hooked(hook):
    torch.manual_seed(1)
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, hook)
    ddp(torch.ones(8, 6) * (td.get_rank() + 1), True).sum().backward()
    return [p.grad.numpy().tobytes() for p in ddp.parameters()]

[hooked(default_hooks.allreduce_hook), hooked(default_hooks.fp16_compress_hook), hooked(own)]
""",
    )


@pytest.mark.slow
def test_fully_sharded(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """`fully_shard` trains on CPU tensors as over gloo, and a checkpoint of its state comes back."""
    both(
        session,
        """
import tempfile
from torch import nn
import torch.distributed.checkpoint as checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

torch.manual_seed(1)
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(3):
    opt.zero_grad()
    loss = model(torch.ones(4, 6) * (td.get_rank() + step + 1)).square().mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())
state = model.state_dict()
folder = [tempfile.mkdtemp()] if td.get_rank() == 0 else [None]
td.broadcast_object_list(folder)
checkpoint.save(state, checkpoint_id=folder[0])
before = {name: value.full_tensor().clone() for name, value in state.items()}
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
state = model.state_dict()
checkpoint.load(state, checkpoint_id=folder[0])
after = {name: value.full_tensor() for name, value in state.items()}
assert all(torch.equal(before[name], after[name]) for name in before)
td.barrier()
if td.get_rank() == 0:
    import shutil
    shutil.rmtree(folder[0])
losses, [value.detach().numpy().tobytes() for value in after.values()]
""",
    )
