"""Tensors as names beside arrays: a state dict of 300 MB, a module in shared memory.

python -m benchmarks.sharing.tensors [--rounds N]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np

import nbparallel as nbp
from benchmarks.report import Figure, Section, human_seconds
from nbparallel.sharing import current_store

RANKS = 2
PARTS, PART = 60, 1_250_000
"""A state of 60 tensors, 300 MB in all, as one of ResNet-50 three times."""
FIRST_SECONDS, LATER_SECONDS, SHARED_SECONDS = 0.15, 0.06, 300e-6
WIDTHS = (4, 400, 4000)
"""Of the shared module's two square layers: 160 B, 1.3 MB, 128 MB."""


def _states() -> dict[str, dict[str, Any]]:
    import torch

    numpys = {f"layer{n}.weight": np.full(PART, n, np.float32) for n in range(PARTS)}
    return {"torch": {name: torch.from_numpy(a.copy()) for name, a in numpys.items()}, "numpy": numpys}


def _timed(session: nbp.Session, cell: str, names: dict[str, Any]) -> float:
    began = time.perf_counter()
    session.run(cell, namespace=names, want_values=False, show_values=False)
    return time.perf_counter() - began


def state_dicts(rounds: int) -> list[Figure]:
    """Return rows of the first cell that names a state dict, and of those that follow."""
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(rounds + 1):  # the first touches memory that no process had before
        for library, state in list(_states().items())[:: (-1) ** turn]:
            with nbp.Session(RANKS) as session:
                names: dict[str, Any] = {"state": state}
                session.run("import numpy, torch", namespace=names)
                empty = statistics.median(_timed(session, "pass", names) for _ in range(5))
                first = _timed(session, "state", names) - empty
                later = statistics.median(_timed(session, "state", names) for _ in range(3)) - empty
                if turn:
                    took[library, "first"].append(first)
                    took[library, "later"].append(later)
                names.clear()
            del state
            current_store().drain()
            current_store().trim()
    aims = {"first": FIRST_SECONDS, "later": LATER_SECONDS}
    return [
        Figure(
            f"a state dict of 300 MB of {library}, {when} cell",
            human_seconds(value := statistics.median(took[library, when])),
            aim=f"≤ {aims[when]} s" if library == "torch" else "–",
            met=value <= aims[when] if library == "torch" else None,
        )
        for when in aims
        for library in ("torch", "numpy")
    ]


def shared_modules(rounds: int) -> list[Figure]:
    """Return rows of a cell that names a module in shared memory, on top of an empty one."""
    import torch

    rows = []
    for width in WIDTHS:
        module = nbp.share(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width)))
        nbytes = sum(each.numel() * each.element_size() for each in module.parameters())
        names: dict[str, Any] = {"model": module}
        with nbp.Session(RANKS) as session:
            session.run("model", namespace=names)
            more = [
                _timed(session, "model", names) - _timed(session, "pass", names) for _ in range(rounds * 20)
            ]
        value = statistics.median(more[5:])
        names.clear()
        what = f"a shared module of {nbytes:,} bytes, each cell"
        shown = human_seconds(max(value, 1e-6))
        rows.append(Figure(what, shown, aim="≤ 0.3 ms", met=value <= SHARED_SECONDS))
        del module
        current_store().drain()
    return rows


def run(*, quick: bool) -> Section:
    """Measure state dicts and modules, if torch is there."""
    rounds = 1 if quick else 5
    there = importlib.util.find_spec("torch") is not None
    return Section(
        "Tensors as names, on two ranks",
        [*state_dicts(rounds), *shared_modules(rounds)]
        if there
        else [Figure("tensors", "not measured: torch is not installed")],
        "A cell that names it, on top of an empty cell: the first writes it into shared memory, the others "
        "find out that it has not changed. The same numbers as a dict of arrays beside it, in turns.",
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for row in [*state_dicts(options.rounds), *shared_modules(options.rounds)]:
        print(f"{row.what:60}{row.value:>20}  {row.aim}", flush=True)


if __name__ == "__main__":
    main()
