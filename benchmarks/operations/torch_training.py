"""torch.distributed on our memory beside gloo: all_reduce by torch's API, and a step of DDP.

python -m benchmarks.operations.torch_training [--ranks 2 4] [--seconds 2]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.report import Figure, Section, human_seconds, installed
from nbparallel.session import Session

MIB = 1 << 20
SIZES = {8: ("8 B", 8.0), MIB: ("1 MB", 8.0), 16 * MIB: ("16 MB", 4.0)}
"""Bytes of an all_reduce: its name, and how many times faster than gloo it should be."""
LAYERS = {"1.1 M": (256, 1024, 808, 10), "11.7 M": (512, 2048, 2048, 2048, 1096, 10)}
"""Widths of the layers of a network, by the number of its parameters; ResNet-18 has 11.7 M."""
STEP_AIM = 1.5
BATCH = 8
OURS, GLOO = "nbparallel", "gloo"
Times = dict[str, dict[str, float]]
"""What was measured -> backend -> seconds, the median of one rank's rounds."""


def _model(widths: Sequence[int]) -> Any:
    import torch

    torch.manual_seed(0)
    layers: list[Any] = []
    for one, other in itertools.pairwise(widths):
        layers += [torch.nn.Linear(one, other), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _trainer(model: Any, group: Any, rank: int) -> tuple[Any, Callable[[], None]]:
    """Return a model under DistributedDataParallel, and what does one step with it."""
    import torch

    random = torch.Generator().manual_seed(rank)
    inputs = torch.randn(BATCH, model[0].in_features, generator=random)
    targets = torch.randint(0, model[-1].out_features, (BATCH,), generator=random)
    parallel = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(parallel(inputs), targets).backward()
        optimizer.step()

    return parallel, step


def _check_models(models: Mapping[str, Any]) -> None:
    """Raise unless ranks hold the same bits, and both backends the same weights but for rounding."""
    import torch
    import torch.distributed as dist

    for name, ours in models[OURS].state_dict().items():
        torch.testing.assert_close(ours, models[GLOO].state_dict()[name], rtol=1e-3, atol=1e-5)
        first = ours.clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, ours):
            raise AssertionError(f"{name} differs between ranks")


def _all_reduce(nbytes: int, group: Any, rank: int, ranks: int) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    x = (
        torch.full((1,), rank + 1.0, dtype=torch.float64)
        if nbytes == 8
        else torch.full((nbytes // 4,), rank + 1.0)
    )
    dist.all_reduce(x, group=group)
    if not bool((x == ranks * (ranks + 1) // 2).all()):
        raise AssertionError(f"all_reduce of {nbytes} B is wrong")
    x.zero_()
    return lambda: dist.all_reduce(x, group=group)


def _in_turns(
    calls: Mapping[str, Callable[[], object]], seconds: float, agree: Callable[[float], float]
) -> dict[str, float]:
    """Return the median seconds of a call of each contender, whose rounds take turns."""
    import torch.distributed as dist

    batches, once = {}, {}
    for name, call in calls.items():
        call()
        began = time.perf_counter()
        call()
        once[name] = agree(time.perf_counter() - began)
        batches[name] = max(1, min(200, int(0.02 / once[name])))
    rounds = int(max(7, min(40, seconds / sum(batches[name] * once[name] for name in calls))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(batches[name]):
                call()
            times[name].append((time.perf_counter() - began) / batches[name])
    return {name: statistics.median(each) for name, each in times.items()}


def measure_rank(seconds: float) -> Times:
    """Measure on one rank of a session; all call it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # its best on one machine
    import torch
    import torch.distributed as dist

    dist.init_process_group(OURS)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {OURS: None, GLOO: dist.new_group(backend=GLOO)}

    def agree(value: float) -> float:
        longest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return float(longest)

    found: Times = {}
    for nbytes, (name, _) in SIZES.items():
        reductions = {backend: _all_reduce(nbytes, group, rank, ranks) for backend, group in groups.items()}
        found[name] = _in_turns(reductions, seconds, agree)
    for name, widths in LAYERS.items():
        trainers = {backend: _trainer(_model(widths), group, rank) for backend, group in groups.items()}
        for _, step in trainers.values():
            for _ in range(3):
                step()
        _check_models({backend: parallel for backend, (parallel, _) in trainers.items()})
        found[name] = _in_turns({backend: step for backend, (_, step) in trainers.items()}, seconds, agree)
    dist.destroy_process_group()
    return found


def measure(ranks: int, seconds: float) -> Times:
    """Return the longest seconds over the ranks of a session."""
    with Session(ranks) as session:
        each = session.call(measure_rank, seconds)
    return {
        name: {backend: max(times[name][backend] for times in each) for backend in (OURS, GLOO)}
        for name in each[0]
    }


def figures(ranks: int, seconds: float) -> list[Figure]:
    """Return one row for each size and model."""
    aims = dict(SIZES.values())
    rows = []
    for name, times in measure(ranks, seconds).items():
        aim = aims.get(name, STEP_AIM)
        what = f"all_reduce {name}" if name in aims else f"a step of DDP, {name} parameters"
        ours, gloo = times[OURS], times[GLOO]
        rows.append(
            Figure(
                f"{what}, {ranks} ranks",
                human_seconds(ours),
                f"gloo: {human_seconds(gloo)}",
                gloo / ours,
                f"≥ {aim:g} × gloo",
                gloo / ours >= aim,
            )
        )
    return rows


def run(*, quick: bool) -> Section:
    """Measure with two ranks and with four."""
    title = "torch.distributed: nbparallel and gloo"
    if not installed("torch"):
        return Section(title, [], "torch is not installed.")
    rows = [row for ranks in (2, 4) for row in figures(ranks, 0.5 if quick else 3)]
    return Section(
        title,
        rows,
        "Calls of `torch.distributed` on the ranks of a session, on private tensors, after "
        '`init_process_group("nbparallel")`; gloo on lo as a second group of the same processes, in turns. '
        "Each rank's torch has its share of the CPUs. A step of DistributedDataParallel (DDP) is forward, "
        f"backward and SGD with momentum on {BATCH} rows for each rank of a network of linear layers; "
        "ResNet-18 has 11.7 M parameters too. Longest over the ranks, of medians; results and weights were "
        "compared first.",
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    options = parser.parse_args()
    for ranks in options.ranks:
        for row in figures(ranks, options.seconds):
            print(f"{row.what:45} {row.ratio:5.2f}  {row.value:12} {row.peer:18} {row.aim}", flush=True)


if __name__ == "__main__":
    main()
