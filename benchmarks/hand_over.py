"""Handing an array that is shared already to four ranks, whatever its size and strategy.

python -m benchmarks.hand_over [--sizes BYTES …] [--rounds N] [--strategies NAME …]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import nbparallel as nbp
from benchmarks.report import Figure, Section, human_seconds
from benchmarks.share_and_read import human_bytes
from nbparallel.errors import SharedMemoryFullError
from nbparallel.sharing import current_store

STRATEGIES = ("file_descriptor", "file_system", "file_region", "mmap")
SIZES = (1 << 10, 1 << 20, 64 << 20, 1 << 30)
RANKS = 4
AIM_SECONDS = 200e-6


def _timed(session: nbp.Session, cell: str, names: dict[str, Any]) -> float:
    began = time.perf_counter()
    session.run(cell, namespace=names, want_values=False, show_values=False)
    return time.perf_counter() - began


def _check(session: nbp.Session, array: Any) -> None:
    array[0], array[-1] = 3, 5
    names = {"x": array, "y": array[1:]}
    right = (array.size, 3, 5, 5, True)
    cell = "import nbparallel as nbp\nx.size, int(x[0]), int(x[-1]), int(y[-1]), nbp.is_shared(x)"
    found = session.run(cell, namespace=names, show_values=False).values
    if found != [right] * RANKS:
        raise AssertionError(f"ranks see {list(found)}, not {right}")
    names.clear()
    session.run("pass", namespace=names)


def measure(strategy: str, nbytes: int, rounds: int) -> tuple[float, float] | str:
    """Return seconds on top of an empty cell: for memory no rank has mapped, and for a new view of it.

    Or what stands in the way.
    """
    times: dict[str, list[float]] = {"empty": [], "first": [], "again": []}
    names: dict[str, Any] = {}
    with nbp.Session(RANKS) as session:
        session.run("pass", namespace=names)
        try:
            array = nbp.empty(nbytes, np.uint8, strategy=strategy)
        except SharedMemoryFullError as error:
            return str(error)
        _check(session, array)
        for turn in range(rounds + 1):
            # The ranks unmapped it when its name went; this cell ends whatever they had still to do about it.
            session.run("pass", namespace=names)
            empty = _timed(session, "pass", names)
            names["x"] = array
            first = _timed(session, "x", names)
            empty_again = _timed(session, "pass", names)
            names["y"] = array[turn % nbytes :]
            again = _timed(session, "y", names)
            names.clear()
            session.run("pass", namespace=names)
            if turn:
                times["empty"] += [empty, empty_again]
                times["first"].append(first)
                times["again"].append(again)
        del array
    current_store().drain()
    current_store().trim()
    empty = statistics.median(times["empty"])
    return statistics.median(times["first"]) - empty, statistics.median(times["again"]) - empty


def figures(strategies: Sequence[str], sizes: Sequence[int], rounds: int, launches: int) -> list[Figure]:
    """Return two rows for each strategy and size."""
    rows = []
    for size in sizes:
        for strategy in strategies:
            found = [measure(strategy, size, rounds) for _ in range(launches)]
            what = f"{human_bytes(size)}, `{strategy}`"
            times = [each for each in found if not isinstance(each, str)]
            if not times:
                rows.append(Figure(what, f"not measured: {found[0]}"))
                continue
            for name, index in (("a new view", 1), ("the first time", 0)):
                seconds = statistics.median(each[index] for each in times)
                met = None if index == 0 else seconds <= AIM_SECONDS
                # Medians of many cells differ by chance as well.
                value = human_seconds(seconds) if seconds > 0 else "not to be told from an empty cell"
                rows.append(Figure(f"{what}, {name}", value, aim="–" if met is None else "≤ 200 µs", met=met))
    return rows


def run(*, quick: bool) -> Section:
    """Measure every strategy but `copy`."""
    return Section(
        "An array that is shared already, on four ranks",
        figures(STRATEGIES, SIZES, 10 if quick else 60, 1 if quick else 5),
        "A cell that names it, on top of an empty cell on the same ranks, taking turns. "
        "The first time every rank fetches the descriptor and maps the memory; a new view of it is a handle "
        "only. Nothing is read.",
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for row in figures(options.strategies, options.sizes, options.rounds, 1):
        print(f"{row.what:44}{row.value:>12}  {row.aim}", flush=True)


if __name__ == "__main__":
    main()
