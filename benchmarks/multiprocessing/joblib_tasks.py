"""Eight tasks of joblib that all have one array of 64 MB, in our processes and in loky's.

python -m benchmarks.multiprocessing.joblib_tasks [--rounds N]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import nbparallel as nbp
import nbparallel.multiprocessing as mp
from benchmarks.multiprocessing.launches import (
    beside,
    command_line,
    medians_of_launches,
    medians_of_turns,
)
from benchmarks.report import Figure, Section, installed

MODULE = "benchmarks.multiprocessing.joblib_tasks"
NBYTES = 64 * 10**6
TASKS, WORKERS = 8, 2
DIFFERENT = 251
"""Values of an array's elements: each call has another."""
CALLS_AT_FIRST = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "as they come": {},
    "half the tasks a batch": {"batch_size": TASKS // WORKERS, "pre_dispatch": "all"},
}
"""How joblib may send the tasks; loky's figure is that of the quickest way."""
KEPT = "kept"
"""The third way: one `Parallel` for all calls, as its ``with`` statement gives."""
MEMORY = "/dev/shm"
"""Where loky keeps the arrays that it maps, too."""


def ends(array: Any, n: int) -> int:
    """Read the first and the last element: a task that does little."""
    return int(array[0]) + int(array[-1]) + n


def _tasks(run: Callable[..., Any], array: Any, value: int) -> float:
    """Return the seconds of one call, whose results are right."""
    from joblib import delayed

    began = time.perf_counter()
    found = run(delayed(ends)(array, n) for n in range(TASKS))
    seconds = time.perf_counter() - began
    if found != [2 * value + n for n in range(TASKS)]:
        raise AssertionError(f"other results: {found}")
    return seconds


def _private(run: Callable[..., Any]) -> Callable[[int], float]:
    def call(turn: int) -> float:
        value = turn % DIFFERENT
        return _tasks(run, np.full(NBYTES, value, np.uint8), value)

    return call


def _shared(run: Callable[..., Any], array: Any) -> Callable[[int], float]:
    def call(turn: int) -> float:
        value = turn % DIFFERENT
        array[0] = array[-1] = value
        return _tasks(run, array, value)

    return call


def _runner(backend: str, **options: Any) -> Callable[..., Any]:
    """Return what runs tasks with a new `Parallel` each time, as scikit-learn does; workers stay."""
    from joblib import Parallel

    return lambda tasks: Parallel(n_jobs=WORKERS, backend=backend, **options)(tasks)


def launched(rounds: int) -> dict[str, float]:
    """Measure in this interpreter; return seconds by name."""
    from joblib import Parallel

    mp.register_joblib()
    ours = _runner("nbparallel")
    runners = {name: _runner("loky", **options) for name, options in SETTINGS.items()}
    shared = nbp.zeros(NBYTES, "u1")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, Parallel(WORKERS, backend="loky") as kept:
        runners[KEPT] = kept
        mapped = np.memmap(Path(folder) / "array", np.uint8, "w+", shape=(NBYTES,))
        mapped[:] = 0
        calls = {"private": _private(ours), "shared": _shared(ours, shared)}
        for name, run in runners.items():
            calls[f"private loky, {name}"] = _private(run)
            calls[f"mapped loky, {name}"] = _shared(run, mapped)
        return medians_of_turns(calls, rounds, uncounted=CALLS_AT_FIRST)


def rows(found: dict[str, float]) -> list[Figure]:
    """Return the rows of what was measured, each beside loky's quickest way."""
    best = {
        what: min((key for key in found if key.startswith(what)), key=found.__getitem__)
        for what in ("private loky", "mapped loky")
    }
    copied, mapped = best["private loky"], best["mapped loky"]
    one = f"{TASKS} tasks with one 64 MB array"
    return [
        beside(f"{one}, private", found, "private", (copied, copied), "2 × loky", 2),
        beside(f"{one}, shared", found, "shared", (copied, copied), "3 × loky", 3),
        beside(f"{one}, shared", found, "shared", (mapped, mapped)),
    ]


def run(*, quick: bool) -> Section:
    """Measure in several interpreters, one after the other, if joblib is there."""
    title = f"Tasks of joblib in {WORKERS} workers"
    if not installed("joblib"):
        return Section(title, [Figure("tasks", "not measured: joblib is not installed")])
    rounds, launches = (3, 1) if quick else (9, 5)
    found = medians_of_launches(MODULE, launches, "--launch", "--rounds", str(rounds))
    return Section(
        title,
        rows(found),
        f"A call of `Parallel` until its results are there; workers wait already, and a task reads two "
        f"elements. Medians of {launches} launches with {rounds} rounds each, all taking turns. A private "
        "array is a new one for each call: we copy it once, loky writes it to a file in shared memory once. "
        "*Mapped*: an `np.memmap` of such a file, which loky sends by name. loky's figure is the least of "
        "three: tasks one by one, half of them a batch, one `Parallel` that is kept.",
    )


def main() -> None:
    """Print the figures of one launch: with ``--launch`` as JSON."""
    command_line(__doc__, MODULE, launched, rows, rounds=5)


if __name__ == "__main__":
    main()
