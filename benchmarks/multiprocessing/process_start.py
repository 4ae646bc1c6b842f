"""Start and end of a process, and a pool's empty tasks, beside the library's.

python -m benchmarks.multiprocessing.process_start [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as library
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import nbparallel.multiprocessing as mp
from benchmarks.multiprocessing.launches import in_turns, launch, medians_of_launches
from benchmarks.report import Figure, Section, human_seconds

AIMS = {"fork": 1.3, "forkserver": 2.0, "Pool.map": 1.3}
"""How many times the library's time at most."""
IMPORT_SECONDS = 0.1
TASKS = 10**5
MODULE = "benchmarks.multiprocessing.process_start"
MODULES = {"ours": mp, "library": library}
IMPORT = """
import multiprocessing.pool, multiprocessing.managers, multiprocessing.queues, time
began = time.perf_counter()
import nbparallel.multiprocessing
print(time.perf_counter() - began)
"""


def same(value: int) -> int:
    """Return the argument: an empty task."""
    return value


def _start(module: Any, method: str) -> Callable[[], float]:
    context = module.get_context(method)

    def call() -> float:
        process = context.Process(target=abs, args=(1,))
        began = time.perf_counter()
        process.start()
        process.join()
        seconds = time.perf_counter() - began
        if process.exitcode != 0:
            raise AssertionError(f"the process ended with {process.exitcode}")
        return seconds

    return call


def _tasks(pool: Any) -> Callable[[], float]:
    def call() -> float:
        began = time.perf_counter()
        found = pool.map(same, range(TASKS))
        seconds = time.perf_counter() - began
        if found != list(range(TASKS)):
            raise AssertionError("other results")
        return seconds

    return call


def _import() -> float:
    return float(subprocess.check_output([sys.executable, "-c", IMPORT], timeout=60))


def launched(rounds: int) -> dict[str, float]:
    """Measure in this interpreter: first starts, because a pool brings threads."""
    calls = {
        f"{method} {name}": _start(module, method)
        for method in ("fork", "forkserver")
        for name, module in MODULES.items()
    }
    found = _measure(calls, rounds)
    pools = {name: module.get_context("fork").Pool(2) for name, module in MODULES.items()}
    try:
        found |= _measure({f"Pool.map {name}": _tasks(pool) for name, pool in pools.items()}, rounds)
    finally:
        for pool in pools.values():
            pool.terminate()
            pool.join()
    return found | {"import": statistics.median(_import() for _ in range(3))}


def _measure(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in in_turns(tuple(calls), turn):
            seconds = calls[name]()
            if turn:  # the first brings the server up
                took[name].append(seconds)
    return {name: statistics.median(times) for name, times in took.items()}


def rows(found: dict[str, float]) -> list[Figure]:
    """Return the rows of what was measured."""
    table = []
    for what, text in (
        ("fork", "start and end, fork"),
        ("forkserver", "start and end, forkserver (warm)"),
        ("Pool.map", f"Pool.map of {TASKS:,} empty tasks"),
    ):
        ours, theirs, most = found[f"{what} ours"], found[f"{what} library"], AIMS[what]
        peer = f"multiprocessing: {human_seconds(theirs)}"
        table.append(
            Figure(text, human_seconds(ours), peer, theirs / ours, f"≤ {most:g} ×", ours <= most * theirs)
        )
    took = found["import"]
    met = took < IMPORT_SECONDS
    text = "import, beyond multiprocessing's own"
    table.append(Figure(text, human_seconds(took), aim=f"< {IMPORT_SECONDS:g} s", met=met))
    return table


def run(*, quick: bool) -> Section:
    """Measure in several interpreters, one after the other."""
    rounds, launches = (5, 1) if quick else (20, 5)
    found = medians_of_launches(MODULE, launches, "--launch", "--rounds", str(rounds))
    return Section(
        "Processes and empty tasks",
        rows(found),
        f"A process that returns: from `start` until `join` is over; the map in a pool of two, started by "
        f"fork. Medians of {launches} launches with {rounds} rounds each, taking turns. "
        "The program has no file that the library's children would run again, which would cost them more.",
    )


def main() -> None:
    """Print the figures of one launch: with ``--launch`` as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--launch", action="store_true")
    options = parser.parse_args()
    if options.launch:
        print(json.dumps(launched(options.rounds)))
        return
    found = launch(MODULE, "--launch", "--rounds", str(options.rounds))
    for row in rows(found):
        ratio = f"{row.ratio:.2f} ×" if row.ratio else ""
        print(f"{row.what:40}{row.value:>12}  {row.peer:35} {ratio:10} {row.aim}", flush=True)


if __name__ == "__main__":
    main()
