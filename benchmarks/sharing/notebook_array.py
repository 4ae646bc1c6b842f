"""A 64 MB array of the notebook on four ranks: the first cell that names it, and all later ones."""

from __future__ import annotations

import statistics

from benchmarks.notebook import (
    START_DASK,
    START_IPYPARALLEL,
    STOP_DASK,
    STOP_IPYPARALLEL,
    TIMER,
    answer,
    run as run_cell,
)
from benchmarks.report import Figure, Section, human_seconds, installed, not_installed, spread
from tests.harness.kernel import Kernel

AIM_LATER_SECONDS = 200e-6

PREPARE = """
import numpy as np
SIZE = 8_000_000            # float64: 64 MB
source = np.arange(SIZE, dtype=float)

def fresh():
    global x
    x = source + 1          # memory of its own, all pages touched

empty = magic("parallel", "", "pass")
naming = magic("parallel", "", "n = x.nbytes")
def one_copy():
    x.copy()
def first_time():
    fresh()
    started = time.perf_counter()
    naming()
    return time.perf_counter() - started
def push():
    client[:].push({"x": x}, block=True)
def scatter():
    global there
    fresh()
    started = time.perf_counter()
    there = dask.scatter(x, broadcast=True, direct=True)
    named()
    return time.perf_counter() - started
def named():
    tasks = [dask.submit(lambda x: x.nbytes, there, workers=[one], pure=False) for one in workers]
    return dask.gather(tasks)
"""
CHECK = """
fresh()
get_ipython().run_cell_magic("parallel", "-n 4 -o sums", "float(x.sum())")
assert list(sums) == [x.sum()] * 4, sums
"""
CHECK_PEER = """
client[:].push({"x": x}, block=True)
assert client[:].apply_sync(lambda: float(x.sum())) == [x.sum()] * 4
"""
CHECK_DASK = """
scatter()
sums = [dask.submit(lambda x: float(x.sum()), there, workers=[one], pure=False) for one in workers]
assert dask.gather(sums) == [x.sum()] * 4
assert named() == [x.nbytes] * 4
"""


def run(*, quick: bool) -> Section:
    """Measure in one kernel, taking turns with a copy and ipyparallel's push, then with Dask's scatter."""
    rounds = 3 if quick else 9
    cells = 30 if quick else 200
    peer, dask = installed("ipyparallel"), installed("distributed")
    with Kernel() as kernel:
        for code in ("%load_ext nbparallel", "%%parallel -n 4\npass", TIMER, PREPARE, CHECK):
            run_cell(kernel, code)
        calls = ""
        if peer:
            run_cell(kernel, START_IPYPARALLEL, timeout=90)
            run_cell(kernel, CHECK_PEER)
            calls = ", theirs=push"
        times = answer(
            kernel, f"print(take_turns({rounds}, ours=first_time, copy=one_copy{calls}))", timeout=300
        )
        later = answer(kernel, f"naming(); print(take_turns({cells}, empty=empty, naming=naming))")
        if peer:
            run_cell(kernel, STOP_IPYPARALLEL)
        beside: list[tuple[dict[str, list[float]], str, str]] = []
        if dask:  # after the others: its scheduler is a thread of the notebook
            run_cell(kernel, START_DASK, timeout=90)
            run_cell(kernel, CHECK_DASK)
            for count, calls, what, how in (
                (
                    rounds,
                    "ours=first_time, dask=scatter",
                    "first cell that names it",
                    "scatter(broadcast=True)",
                ),
                (cells, "ours=naming, dask=named", "a later cell", "submit"),
            ):
                both = answer(kernel, f"print(take_turns({count}, {calls}))", timeout=300)
                beside.append((both, what, how))
            run_cell(kernel, STOP_DASK)
        run_cell(kernel, "%parallel_stop")
    copy = statistics.median(times["copy"])
    cost = statistics.median(later["naming"]) - statistics.median(later["empty"])
    pushed = f"ipyparallel `push`: {spread(times['theirs'])}" if peer else not_installed("ipyparallel")
    return Section(
        "A 64 MB array of the notebook on four ranks",
        [
            Figure(
                "first cell that names it",
                spread(times["ours"]),
                pushed,
                statistics.median(times["theirs"]) / statistics.median(times["ours"]) if peer else None,
                f"close to one copy ({human_seconds(copy)})",
            ),
            Figure(
                "every later cell, on top of an empty one",
                human_seconds(max(0.0, cost)),
                f"{pushed} (again, each time)" if peer else pushed,
                statistics.median(times["theirs"]) / max(cost, 1e-6) if peer else None,
                "≤ 200 µs",
                cost <= AIM_LATER_SECONDS,
            ),
            *(
                Figure(
                    f"{what}, beside Dask",
                    spread(both["ours"]),
                    f"Dask `{how}`: {spread(both['dask'])}",
                    statistics.median(both["dask"]) / statistics.median(both["ours"]),
                )
                for both, what, how in beside
            ),
        ],
        "A new array each time, so that the cell moves it into shared memory; earlier memory is reused.",
    )
