"""The first ``%%parallel -n 4`` on a fresh kernel, until all four ranks were heard."""

from __future__ import annotations

import statistics
import time

from benchmarks.notebook import START_DASK, START_IPYPARALLEL, STOP_DASK, STOP_IPYPARALLEL, run as run_cell
from benchmarks.report import Figure, Section, installed, not_installed, spread
from tests.harness.kernel import Kernel

AIM_SECONDS = 0.4
AIM_RATIO = 8.0
PAUSE_SECONDS = 1.0
"""From loading to the first cell, as a person needs at least; what ranks are forked from starts in it."""


def until_heard(kernel: Kernel, code: str, words: list[str]) -> float:
    """Seconds from sending a cell until every word was seen in its output."""
    outcome = kernel.run(code, timeout=90)
    text = ""
    for message in outcome.messages:
        content = message.content
        if message.kind == "stream":
            text += content["text"]
        elif message.kind == "display_data":
            text += content["data"].get("text/plain", "")
        if all(word in text for word in words):
            return message.seconds - outcome.started
    raise RuntimeError(f"{code}\nended with {outcome.status}: {outcome.traceback}{text}")


def nbparallel_seconds(pause: float = 0.0, before: str = "pass") -> tuple[float, float]:
    """Run `before`, load the extension, wait; then the first cell.  Seconds of loading and of that cell."""
    words = [f"rank {rank} is here" for rank in range(4)]
    with Kernel() as kernel:
        run_cell(kernel, before)
        loading = kernel.run("%load_ext nbparallel").seconds
        time.sleep(pause)
        first = until_heard(kernel, '%%parallel -n 4\nprint(f"rank {rank} is here")', words)
        run_cell(kernel, "%parallel_stop")
    return loading, first


def ipyparallel_seconds() -> float:
    """Start a cluster of four and run the first ``%%px``."""
    words = [f"engine {engine} is here" for engine in range(4)]
    with Kernel() as kernel:
        run_cell(kernel, "import ipyparallel")
        run_cell(kernel, "%load_ext ipyparallel")
        scatter = "client[:].scatter('engine', range(4), flatten=True, block=True)"
        say = """get_ipython().run_cell_magic("px", "", 'print(f"engine {engine} is here")')"""
        first = until_heard(kernel, f"{START_IPYPARALLEL}\n{scatter}\n{say}", words)
        run_cell(kernel, STOP_IPYPARALLEL)
    return first


def dask_seconds() -> float:
    """Start four workers and call a function on each."""
    with Kernel() as kernel:
        run_cell(kernel, "import distributed")
        say = 'print(*dask.run(lambda dask_worker: f"{dask_worker.name} is here").values())'
        first = until_heard(kernel, f"{START_DASK}\n{say}", [f"{worker} is here" for worker in range(4)])
        run_cell(kernel, STOP_DASK)
    return first


def run(*, quick: bool) -> Section:
    """Measure on fresh kernels, taking turns."""
    ours: list[float] = []
    warm: list[float] = []
    warm_numpy: list[float] = []
    loading: list[float] = []
    theirs: list[float] = []
    dask: list[float] = []
    peer = installed("ipyparallel")
    nbparallel_seconds()  # compiles, where that was never done
    for _ in range(2 if quick else 5):
        load, first = nbparallel_seconds()
        loading.append(load)
        ours.append(first)
        warm.append(nbparallel_seconds(PAUSE_SECONDS)[1])
        warm_numpy.append(nbparallel_seconds(PAUSE_SECONDS, "import numpy")[1])
        if peer:
            theirs.append(ipyparallel_seconds())
        if installed("distributed"):
            dask.append(dask_seconds())
    ratio = statistics.median(theirs) / statistics.median(ours) if theirs else None
    return Section(
        "From nothing to four ranks",
        [
            Figure("`%load_ext nbparallel`", spread(loading)),
            Figure(
                "first `%%parallel -n 4` on a fresh kernel, right after loading, until its output",
                spread(ours),
                f"ipyparallel `Cluster(n=4)`: {spread(theirs)}" if peer else not_installed("ipyparallel"),
                ratio,
                f"≤ {AIM_SECONDS} s, ≥ {AIM_RATIO:g} ×",
                statistics.median(ours) <= AIM_SECONDS and (ratio is None or ratio >= AIM_RATIO),
            ),
            Figure(
                "the same, beside Dask",
                spread(ours),
                f"Dask `Client(n_workers=4)`: {spread(dask)}" if dask else not_installed("distributed"),
                statistics.median(dask) / statistics.median(ours) if dask else None,
            ),
            Figure(f"the same, {PAUSE_SECONDS:g} s after loading", spread(warm)),
            Figure("the same, in a notebook that has imported numpy", spread(warm_numpy)),
        ],
        "A fresh kernel each time; from sending the cell to the message that completed the text of all four. "
        "Importing ipyparallel or distributed is not counted, as loading our extension is not.",
    )
