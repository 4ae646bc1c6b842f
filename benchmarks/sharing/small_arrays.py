"""Ten thousand arrays of a hundred numbers on four ranks: time for each, descriptors and mappings."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import nbparallel as nbp
from benchmarks.report import Figure, Section, human_seconds, spread

STRATEGIES = ("file_descriptor", "file_system", "file_region", "mmap")
COST = """
import os
def cost():
    maps = open("/proc/self/maps").read().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("nbp" in line for line in maps)
"""
MOST_DESCRIPTORS, MOST_MAPPINGS = 64, 128


def _cost(pid: int) -> tuple[int, int]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len(os.listdir(f"/proc/{pid}/fd")), sum("nbp" in line for line in maps)


def _once(session: nbp.Session, count: int) -> tuple[float, float, list[tuple[int, int]]]:
    """Return the seconds for making and for handing over, and what each process holds then."""
    started = time.perf_counter()
    arrays = [nbp.full(100, number) for number in range(count)]
    made = time.perf_counter()
    session.push(arrays=arrays)
    sums = list(session.run("sum(float(x[0]) for x in arrays)").values)
    done = time.perf_counter()
    if sums != [count * (count - 1) / 2] * 4:
        raise AssertionError(f"the ranks see other numbers: {sums}")
    costs = [_cost(os.getpid()), *session.run("cost()").values]
    del arrays
    session.run("arrays = None")
    return made - started, done - made, costs


def _names(session: nbp.Session, count: int) -> float:
    """Return the seconds of the first cell that names so many private arrays of the notebook."""
    namespace: dict[str, Any] = {f"x{number}": np.full(100, float(number)) for number in range(count)}
    lines = [
        ", ".join(f"x{number}" for number in range(k, min(count, k + 100))) for k in range(0, count, 100)
    ]
    started = time.perf_counter()
    session.run("\n".join(lines), namespace=namespace, show_values=False)
    seconds = time.perf_counter() - started
    namespace.clear()
    session.run("pass", namespace=namespace)
    return seconds


def run(*, quick: bool) -> Section:
    """Measure every strategy in one session."""
    count, rounds = (2_000, 2) if quick else (10_000, 5)
    figures = []
    before = nbp.get_sharing_strategy()
    with nbp.Session(4) as session:
        session.run(COST)
        for strategy in STRATEGIES:
            nbp.set_sharing_strategy(strategy)
            _once(session, 100)
            rows = [_once(session, count) for _ in range(rounds)]
            named = [_names(session, count) / count for _ in range(rounds)]
            descriptors = max(cost[0] for row in rows for cost in row[2])
            mappings = max(cost[1] for row in rows for cost in row[2])
            figures += [
                Figure(
                    f"`{strategy}`: one array of {count}, made and handed to 4 ranks",
                    f"{spread([(row[0] + row[1]) / count for row in rows])}, "
                    f"of which made {human_seconds(min(row[0] for row in rows) / count)}",
                ),
                Figure(f"`{strategy}`: one private array of {count}, named in a cell", spread(named)),
                Figure(
                    f"`{strategy}`: descriptors, mappings in the process that has most",
                    f"{descriptors}, {mappings}",
                    aim=f"≤ {MOST_DESCRIPTORS}, ≤ {MOST_MAPPINGS}",
                    met=descriptors <= MOST_DESCRIPTORS and mappings <= MOST_MAPPINGS,
                ),
            ]
    nbp.set_sharing_strategy(before)
    return Section("Ten thousand small arrays", figures, "Arrays of 100 float64, all alive at the same time.")
