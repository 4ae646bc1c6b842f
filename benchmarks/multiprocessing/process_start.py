"""Start and end of a process, and a pool's empty tasks, beside the library's.

python -m benchmarks.multiprocessing.process_start [--rounds N]
"""

from __future__ import annotations

import multiprocessing as library
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import nbparallel.multiprocessing as mp
from benchmarks.multiprocessing.launches import (
    beside,
    command_line,
    medians_of_launches,
    medians_of_turns,
)
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


def _start(module: Any, method: str) -> Callable[[int], float]:
    context = module.get_context(method)

    def call(turn: int) -> float:
        del turn
        process = context.Process(target=abs, args=(1,))
        began = time.perf_counter()
        process.start()
        process.join()
        seconds = time.perf_counter() - began
        if process.exitcode != 0:
            raise AssertionError(f"the process ended with {process.exitcode}")
        return seconds

    return call


def _tasks(pool: Any) -> Callable[[int], float]:
    def call(turn: int) -> float:
        del turn
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
    found = medians_of_turns(calls, rounds)  # the first turn brings the fork servers up
    pools = {name: module.get_context("fork").Pool(2) for name, module in MODULES.items()}
    try:
        found |= medians_of_turns({f"Pool.map {name}": _tasks(pool) for name, pool in pools.items()}, rounds)
    finally:
        for pool in pools.values():
            pool.terminate()
            pool.join()
    return found | {"import": statistics.median(_import() for _ in range(3))}


def rows(found: dict[str, float]) -> list[Figure]:
    """Return the rows of what was measured."""
    table = []
    for what, text in (
        ("fork", "start and end, fork"),
        ("forkserver", "start and end, forkserver (warm)"),
        ("Pool.map", f"Pool.map of {TASKS:,} empty tasks"),
    ):
        peer, most = (f"{what} library", "multiprocessing"), AIMS[what]
        table.append(beside(text, found, f"{what} ours", peer, f"≤ {most:g} ×", 1 / most))
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
    command_line(__doc__, MODULE, launched, rows, rounds=10)


if __name__ == "__main__":
    main()
