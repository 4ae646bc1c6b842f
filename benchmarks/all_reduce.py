"""all_reduce, barrier and a blocked recv, beside torch's gloo in the same processes.

One harness for both: the same ranks, arrays and dtype; results are checked before anything is timed;
repetitions alternate between the two, so that whatever else the machine does hits both alike.  The time of an
operation is the longest over the ranks; printed are medians over repetitions and launches.

    python -m benchmarks.all_reduce [--ranks 2 4] [--launches 3] [--sizes 8 1024 65536 1048576 67108864]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.report import Figure, Section, human_seconds, installed, not_installed
from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveTimeoutError
from nbparallel.testing.ranks import run_ranks

HAS_TORCH = installed("torch")
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 64 << 20)
SECONDS = 0.25
"""Of one operation in one launch."""
NOTES = (
    "Forked ranks without a session, all checks on; torch over gloo on lo with one thread, in the same "
    "processes, taking turns; the longest time over the ranks, median of rounds and launches; the same "
    "arrays again and again (hot)."
)


def connect_gloo(rank: int, world_size: int, folder: str) -> Any:
    """Return torch.distributed, connected over gloo, at its best for one machine."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=world_size)
    return dist


def timed(call: Callable[[], Any], barrier: Callable[[], Any], iterations: int) -> float:
    """Return seconds per call, all ranks having started together."""
    barrier()
    begin = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - begin) / iterations


def work(c: Communicator, sizes: Sequence[int], folder: str) -> dict[str, dict[str, list[float]]]:
    """Measure on one rank; returns seconds for each line and contender, one for each repetition."""
    dist = connect_gloo(c.rank, c.world_size, folder) if HAS_TORCH else None
    found: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        count = max(1, size // 4)
        dtype = np.float64 if size == 8 else np.float32
        count = 1 if size == 8 else count
        private = np.zeros(count, dtype)
        shared = c._member.store.empty(count, dtype)
        calls: dict[str, Callable[[], Any]] = {
            "shared": lambda x=shared: c.all_reduce(x),
            "private": lambda x=private: c.all_reduce(x),
        }
        if dist is not None:
            import torch

            tensor = torch.zeros(count, dtype=torch.float64 if size == 8 else torch.float32)
            calls["gloo"] = lambda x=tensor: dist.all_reduce(x)
        for name, call in calls.items():
            array: Any = {"shared": shared, "private": private}.get(name)
            array = tensor.numpy() if array is None else array
            array[...] = c.rank + 1
            call()
            assert (array == sum(range(1, c.world_size + 1))).all(), f"{name} is wrong"
            array[...] = 0  # and stays 0, however often it is summed
        found[f"all_reduce {size}"] = alternate(c, calls)
    calls = {"shared": c.barrier}
    if dist is not None:
        calls["gloo"] = dist.barrier
    found["barrier"] = alternate(c, calls)
    return found


def alternate(c: Communicator, calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Time the calls in turn; returns seconds per call, one for each round."""
    iterations = {}
    for name, call in calls.items():
        call()
        once = c.all_reduce(timed(call, c.barrier, 3), "max")
        iterations[name] = max(1, min(200, int(0.02 / once)))
    spent = sum(iterations[name] * timed(call, c.barrier, 1) for name, call in calls.items())
    rounds = c.all_reduce(max(3, min(25, int(SECONDS * len(calls) / max(spent, 1e-6)))), "min")
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(timed(call, c.barrier, iterations[name]))
    return found


def blocked_recv(c: Communicator) -> float:
    """Return the share of a core that a blocked recv takes."""
    if c.rank == 1:
        time.sleep(1.0)
        c.send(1, 0)
        return 0.0
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    try:
        c.recv(src=1, tag=9, timeout=0.9)
    except CollectiveTimeoutError:
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return used / (time.perf_counter() - begin)
    raise AssertionError("nothing was sent with that tag")


def copy_speed(c: Communicator) -> float:
    """Return bytes read and written per second when every rank copies 32 MB at once."""
    a, b = np.ones(8 << 20, np.float32), np.ones(8 << 20, np.float32)
    return 2 * a.nbytes / min(timed(lambda: np.copyto(a, b), c.barrier, 1) for _ in range(5))


def measure(world_size: int, sizes: Sequence[int], launches: int) -> dict[str, dict[str, float]]:
    """Return seconds for every line and contender: the longest over ranks, the median over the rest."""
    collected: dict[str, dict[str, list[float]]] = {}
    for _ in range(launches):
        with tempfile.TemporaryDirectory(prefix="nbp-bench-") as folder:
            outcomes = run_ranks(world_size, lambda c, f=folder: work(c, sizes, f), seconds=300)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        for line, contenders in outcomes[0].value.items():
            for name in contenders:
                rounds = zip(*(outcome.value[line][name] for outcome in outcomes), strict=True)
                median = statistics.median(max(round_) for round_ in rounds)
                collected.setdefault(line, {}).setdefault(name, []).append(median)
    return {
        line: {name: statistics.median(times) for name, times in found.items()}
        for line, found in collected.items()
    }


AIMS = {(8, "shared"): (30.0, {2: 5e-6, 4: 20e-6}), (64 << 20, "shared"): (6.0, {})}
"""(bytes, array): how many times faster than gloo, and seconds for a number of ranks."""


def figures(world_size: int, sizes: Sequence[int], launches: int) -> list[Figure]:
    """Return the rows for one number of ranks."""
    rows = []
    for line, found in measure(world_size, sizes, launches).items():
        size = int(line.split()[-1]) if " " in line else 0
        gloo = found.get("gloo")
        for kind in ("shared", "private"):
            if kind not in found:
                continue
            ratio, limits = AIMS.get((size, kind), (0.0, {}))
            limit = limits.get(world_size)
            texts = [f"≥ {ratio:g} × gloo"] if ratio and gloo else []
            texts += [f"≤ {limit * 1e6:g} µs"] if limit else []
            met = (not gloo or gloo / found[kind] >= ratio) and (limit is None or found[kind] <= limit)
            rows.append(
                Figure(
                    f"{line}{' B, ' + kind if size else ''}, {world_size} ranks",
                    human_seconds(found[kind]),
                    f"gloo {human_seconds(gloo)}" if gloo else not_installed("torch"),
                    gloo / found[kind] if gloo else None,
                    ", ".join(texts) or "–",
                    met if texts else None,
                )
            )
    return rows


def run(*, quick: bool) -> Section:
    """Measure with 2 and 4 ranks."""
    rows: list[Figure] = []
    speeds = []
    for n in (2, 4):
        rows += figures(n, SIZES, 1 if quick else 5)
        speeds.append(f"{n} ranks copy {min(o.value for o in run_ranks(n, copy_speed)) / 1e9:.0f} GB/s each")
    share = run_ranks(2, blocked_recv)[0].value
    rows.append(
        Figure("processor time of a blocked recv", f"{share:.2%} of a core", aim="< 1 %", met=share < 0.01)
    )
    return Section("all_reduce and barrier", rows, NOTES + f" At the same time {' and '.join(speeds)}.")


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--launches", type=int, default=2)
    options = parser.parse_args()
    for n in options.ranks:
        for row in figures(n, options.sizes, options.launches):
            ratio = f"{row.ratio:8.1f} ×" if row.ratio else ""
            print(f"{row.what:42}{row.value:>12}{row.peer:>34}{ratio:>12}  {row.aim}", flush=True)
    print(f"blocked recv: {run_ranks(2, blocked_recv)[0].value:.2%} of a core")


if __name__ == "__main__":
    main()
