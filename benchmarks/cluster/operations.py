"""`all_reduce` over two hosts, plain and encrypted; beside one host, and MPI."""

from __future__ import annotations

import statistics
import subprocess

import nbparallel as nbp
from benchmarks.cluster.turns import HOSTS, RANKS, figure, take_turns
from benchmarks.operations import mpi
from benchmarks.report import Figure, Section, not_installed
from tests.cluster.dask_cluster import DaskProcesses

AIMS = {8: 2.5e-3, 1 << 20: 8e-3, 64 << 20: 0.4}
"""Seconds by bytes."""
NAMES = {8: "8 B", 1 << 20: "1 MB", 64 << 20: "64 MB"}
REDUCE = """
import time
import numpy as np
x, times = np.empty(SIZE), []
for _ in range(CALLS):
    x[:] = rank + 1
    barrier()
    began = time.perf_counter()
    all_reduce(x)
    times.append(time.perf_counter() - began)
    assert x[0] == x[-1] == 10, x
sum(times) / CALLS
"""


def _ours(session: nbp.Session, nbytes: int) -> float:
    """Return the mean of some calls on the slowest rank."""
    cell = REDUCE.replace("SIZE", str(nbytes // 8)).replace("CALLS", str(20 if nbytes <= 1 << 20 else 1))
    return float(max(session.run(cell).values))


def _over_mpi(seconds: float) -> dict[int, tuple[str, float]]:
    """Return the quicker implementation of MPI, and its seconds, by bytes; nothing if none is installed."""
    best: dict[int, tuple[str, float]] = {}
    for library in mpi.LIBRARIES:
        for level in mpi.LEVELS if library.installed else ():
            try:
                _, times = mpi.measure(library, RANKS, level, seconds, "all_reduce")
            except (subprocess.SubprocessError, OSError):
                continue  # with more ranks than cores some spin for minutes
            for nbytes in AIMS:
                line = f"all_reduce, {nbytes} B"
                rounds = zip(*(next(iter(each[line].values())) for each in times), strict=True)
                found = statistics.median(map(max, rounds))
                best[nbytes] = min(
                    best.get(nbytes, (library.name, found)), (library.name, found), key=lambda x: x[1]
                )
    return best


def run(*, quick: bool) -> Section:
    """Measure; every result is checked, outside of the time."""
    figures: list[Figure] = []
    over_mpi = _over_mpi(0.05 if quick else 0.3)
    with (
        DaskProcesses(HOSTS) as plain, DaskProcesses(HOSTS, tls=True) as secure,
        nbp.Session(cluster=plain.client) as hosts, nbp.Session(cluster=secure.client) as encrypted,
        nbp.Session(RANKS) as one,
    ):  # fmt: skip
        for nbytes, aim in AIMS.items():
            times = take_turns({
                "hosts": lambda n=nbytes: _ours(hosts, n),
                "tls": lambda n=nbytes: _ours(encrypted, n),
                "one host": lambda n=nbytes: _ours(one, n),
            }, 3 if quick else 9)  # fmt: skip
            peers = {"one host": times["one host"]}
            if nbytes in over_mpi:
                peers[f"{over_mpi[nbytes][0]}, one host"] = [over_mpi[nbytes][1]]
            title = f"`all_reduce` of {NAMES[nbytes]}"
            figures.append(figure(title, times["hosts"], aim, peers))
            figures.append(figure(f"{title}, over `tls://`", times["tls"], None, peers))
    missing = "" if over_mpi else f" {not_installed('mpi4py')}: `make mpi` puts it there."
    return Section(
        "Operations over two hosts",
        figures,
        f"Float64; the slowest of 4 ranks, two on each host.{missing}",
    )
