"""average_gradients beside one all_reduce for each array, on the same arrays in turns.

python -m benchmarks.operations.average_gradients [--ranks 2 4] [--seconds 0.5] [--launches 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.report import Figure, Section, human_seconds
from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of, run_ranks

KIB = 1 << 10
SETS: dict[str, Sequence[int]] = {
    "1 × 8 B": [8],
    "1 × 4 KB": [4 * KIB],
    "6 × 400 B": [400] * 6,
    "16 × 4 KB": [4 * KIB] * 16,
    "64 × 4 KB": [4 * KIB] * 64,
    "8 × 32 KB": [32 * KIB] * 8,
    "1 × 64 KB": [64 * KIB],
    "8 × 64 KB": [64 * KIB] * 8,
    "4 × 256 KB": [256 * KIB] * 4,
    "1 × 1 MB": [1024 * KIB],
    "4 × 4 MB": [4096 * KIB] * 4,
    "two layers and a head": [401_408, 512, 32_768, 256, 2_560, 40],
}
"""Bytes of each of the arrays (float32; 8 B is one float64) that are averaged together."""
Rounds = dict[str, dict[str, list[tuple[float, float]]]]
"""Set -> what was called -> wall and processor seconds of a call, round by round."""
BATCH_SECONDS = 0.003
"""Of one round: short, so that what else runs on the machine meets both."""
MOST_ROUNDS = 100
OURS, SINGLE = "average_gradients", "all_reduce"


def _arrays(c: Communicator, sizes: Sequence[int], *, shared: bool) -> list[Any]:
    make = context_of(c).store.zeros if shared else np.zeros
    return [make((1,), np.float64) if size == 8 else make((size // 4,), np.float32) for size in sizes]


def _check(c: Communicator, arrays: list[Any], call: Callable[[], object]) -> None:
    for i, x in enumerate(arrays):
        x[...] = c.rank + i
    call()
    for i, x in enumerate(arrays):
        if not np.allclose(x, (c.world_size - 1) / 2 + i):
            raise AssertionError(f"array {i} of {len(arrays)} is not the average")
        x[...] = 0


def _work(c: Communicator, seconds: float, *, shared: bool) -> Rounds:
    found: Rounds = {}
    for name, sizes in SETS.items():
        arrays = _arrays(c, sizes, shared=shared)

        def single(arrays: list[Any] = arrays) -> None:
            for x in arrays:
                c.all_reduce(x, "avg")

        calls = {OURS: lambda arrays=arrays: c.average_gradients(arrays), SINGLE: single}
        for call in calls.values():
            _check(c, arrays, call)
        began = time.perf_counter()
        single()
        once = c.all_reduce(time.perf_counter() - began, "max")
        batch = max(1, min(200, int(BATCH_SECONDS / once)))
        rounds = max(5, int(seconds / (2 * batch * once)))
        times: dict[str, list[tuple[float, float]]] = {what: [] for what in calls}
        for turn in range(min(rounds, MOST_ROUNDS)):
            for what in (OURS, SINGLE) if turn % 2 else (SINGLE, OURS):
                call = calls[what]
                c.barrier()
                began, used = time.perf_counter(), time.process_time()
                for _ in range(batch):
                    call()
                wall, cpu = time.perf_counter() - began, time.process_time() - used
                times[what].append((wall / batch, cpu / batch))
        found[name] = times
    return found


def measure(ranks: int, *, seconds: float, launches: int, shared: bool) -> Rounds:
    """Return of all rounds of all launches the longest wall time over ranks, and the most processor time."""
    found: Rounds = {name: {OURS: [], SINGLE: []} for name in SETS}
    for _ in range(launches):
        outcomes = run_ranks(ranks, lambda c: _work(c, seconds, shared=shared), seconds=300)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        for name, by_call in found.items():
            for what, rounds in by_call.items():
                for each in zip(*(outcome.value[name][what] for outcome in outcomes), strict=True):
                    rounds.append((max(w for w, _ in each), max(p for _, p in each)))
    return found


def figures(ranks: int, *, seconds: float, launches: int) -> list[Figure]:
    """Return one row for each set of private arrays, and of shared ones."""
    rows = []
    for shared in (False, True):
        for name, by_call in measure(ranks, seconds=seconds, launches=launches, shared=shared).items():
            texts = [
                f"{human_seconds(statistics.median(w for w, _ in each))}, of processor time "
                f"{human_seconds(min(p for _, p in each))}"
                for each in (by_call[OURS], by_call[SINGLE])
            ]
            pairs = zip(by_call[OURS], by_call[SINGLE], strict=True)
            rows.append(
                Figure(
                    f"{name}, {'shared' if shared else 'private'}, {ranks} ranks",
                    texts[0],
                    f"`all_reduce` of each: {texts[1]}",
                    statistics.median(single[0] / ours[0] for ours, single in pairs),
                )
            )
    return rows


def run(*, quick: bool) -> Section:
    """Measure with two ranks and with four."""
    rows = [
        row
        for ranks in (2, 4)
        for row in figures(ranks, seconds=0.1 if quick else 0.5, launches=1 if quick else 3)
    ]
    return Section(
        "Averaging gradients",
        rows,
        "`average_gradients` of all arrays, beside one `all_reduce(x, 'avg')` for each: in turns, on the "
        "same arrays. Wall time: longest over the ranks, median; processor time: the least of all. The "
        "ratio: median over the rounds, each of which calls both.",
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--seconds", type=float, default=0.3, help="of each set")
    parser.add_argument("--launches", type=int, default=1)
    options = parser.parse_args()
    for ranks in options.ranks:
        for row in figures(ranks, seconds=options.seconds, launches=options.launches):
            print(f"{row.what:45} {row.ratio:5.2f}  {row.value:45} {row.peer}", flush=True)


if __name__ == "__main__":
    main()
