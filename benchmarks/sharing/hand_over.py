"""Handing an array that is shared already to four ranks, whatever its size and strategy.

The cell is run twice: with an array that has to be handed over, and again, when the ranks have it.

python -m benchmarks.sharing.hand_over [--sizes BYTES …] [--rounds N] [--strategies NAME …]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

import nbparallel as nbp
from benchmarks.report import Figure, Section, human_seconds
from benchmarks.sharing.share_and_read import human_bytes
from nbparallel.errors import SharedMemoryFullError
from nbparallel.sharing import current_store

STRATEGIES = ("file_descriptor", "file_system", "file_region", "mmap")
SIZES = (1 << 10, 1 << 20, 64 << 20, 1 << 30)
RANKS = 4
AIM_SECONDS = 200e-6
VIEW, LET_GO = "a new view", "after ranks had released it"
NAMES = {LET_GO: "x", VIEW: "y"}
"""What is handed over, and the name under which it is."""


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


def measure(strategy: str, nbytes: int, rounds: int) -> dict[str, tuple[float, float]] | str:
    """Return how long it takes, or what stands in the way.

    By what is handed over: seconds on top of the same cell when ranks have it, and of an empty cell.
    """
    more: dict[tuple[str, str], list[float]] = defaultdict(list)
    names: dict[str, Any] = {}
    with nbp.Session(RANKS) as session:
        session.run("pass", namespace=names)
        try:
            array = nbp.empty(nbytes, np.uint8, strategy=strategy)
        except SharedMemoryFullError as error:
            return str(error)
        _check(session, array)
        for turn in range(rounds + 1):
            # The ranks released it with its name; this cell ends what they still had to do about it.
            session.run("pass", namespace=names)
            took = {"empty": _timed(session, "pass", names)}
            for what, name in NAMES.items():
                names[name] = array if what is LET_GO else array[turn % nbytes :]
                took[what] = _timed(session, name, names)
                took[f"known {what}"] = _timed(session, name, names)
            names.clear()
            session.run("pass", namespace=names)
            for what in NAMES if turn else ():
                more[what, "known"].append(took[what] - took[f"known {what}"])
                more[what, "empty"].append(took[what] - took["empty"])
        del array
    current_store().drain()
    current_store().trim()
    # Of differences within a round: a cell takes ten times as long, and what else runs changes from round
    # to round.
    medians = {pair: statistics.median(seconds) for pair, seconds in more.items()}
    return {what: (medians[what, "known"], medians[what, "empty"]) for what in NAMES}


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
            for name in (VIEW, LET_GO):
                known, empty = (statistics.median(each[name][of] for each in times) for of in (0, 1))
                value = f"{_human(known)} (on top of an empty cell: {_human(empty)})"
                rows.append(Figure(f"{what}, {name}", value, aim="≤ 200 µs", met=known <= AIM_SECONDS))
    return rows


def _human(seconds: float) -> str:
    # Medians of many cells differ by chance as well.
    return human_seconds(seconds) if seconds > 0 else "nothing to be seen"


def run(*, quick: bool) -> Section:
    """Measure every strategy but `copy`."""
    return Section(
        "An array that is shared already, on four ranks",
        figures(STRATEGIES, SIZES, 10 if quick else 60, 1 if quick else 5),
        "A cell that names it, on top of the same cell once more, when the ranks have it: what handing over "
        "costs (median of the differences). In brackets: on top of an empty cell, so with what it costs to "
        "evaluate an expression. All take turns on the same ranks. A new view is a handle only; ranks that "
        "had released the array hold its segment again. Nothing is read.",
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for row in figures(options.strategies, options.sizes, options.rounds, 1):
        print(f"{row.what:60}{row.value:>50}  {row.aim}", flush=True)


if __name__ == "__main__":
    main()
