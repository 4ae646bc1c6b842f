"""`all_reduce` and messages over two hosts; beside an exchange of workers, one host, and MPI."""

from __future__ import annotations

import statistics
import subprocess
import time
from typing import Any

import nbparallel as nbp
from benchmarks.cluster.turns import HOSTS, RANKS, figure, take_turns
from benchmarks.operations import mpi
from benchmarks.report import Figure, Section, not_installed
from tests.cluster.dask_cluster import DaskProcesses

EXCHANGE = "an exchange between the workers"
AIMS = {8: 3.1, 1 << 20: 3.5, 64 << 20: 3.3}
"""By bytes, as many times an exchange: 2.5 ms, 8 ms and 0.4 s on the machine where they were set, on which an
exchange took 0.8 ms, 2.3 ms and 0.12 s."""
SENT = {8: 4.0, 1 << 20: 3.0, 64 << 20: 1.5}
"""The aims of a message, likewise."""
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


MESSAGES = """
import time
import numpy as np
x, y, other = np.full(SIZE, rank), np.empty(SIZE, int), (rank + RANKS) % 4
barrier()
began = time.perf_counter()
for _ in range(CALLS if rank in (0, RANKS) else 0):
    if rank: recv(y, src=other)
    send(x, other)
    if not rank: recv(y, src=other)
assert y[0] == y[-1] == other or rank not in (0, RANKS), y
(time.perf_counter() - began) / CALLS / 2
"""


def _ours(session: nbp.Session, nbytes: int, code: str = REDUCE) -> float:
    """Return the mean of some calls on the slowest rank."""
    cell = (
        code.replace("RANKS", str(RANKS // 2))
        .replace("SIZE", str(nbytes // 8))
        .replace("CALLS", str(20 if nbytes <= 1 << 20 else 1))
    )
    return float(max(session.run(cell).values))


def _take_bytes(dask_worker: Any) -> None:
    """Add a handler that takes bytes; runs on a worker."""

    async def take(data: Any) -> int:
        return len(data)

    dask_worker.handlers["benchmark_exchange"] = take


async def _exchange(nbytes: int, calls: int, dask_worker: Any) -> float:
    """Send bytes to every other worker, which does so as well; returns the mean seconds; runs on a worker."""
    from distributed.protocol import to_serialize

    content = bytearray(nbytes)
    listed = await dask_worker.scheduler.identity(n_workers=-1)
    others = [dask_worker.rpc(peer) for peer in listed["workers"] if peer != dask_worker.address]
    began = time.perf_counter()
    for _ in range(calls):
        for other in others:
            data: Any = to_serialize(content)
            assert await other.benchmark_exchange(data=data) == nbytes
    return (time.perf_counter() - began) / calls


def _exchanged(client: Any, nbytes: int) -> float:
    """Return what an exchange takes between the workers themselves, by Dask's own means."""
    return float(max(client.run(_exchange, nbytes, 20 if nbytes <= 1 << 20 else 1).values()))


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
        plain.client.run(_take_bytes)
        for nbytes, aim in AIMS.items():
            times = take_turns({
                "hosts": lambda n=nbytes: _ours(hosts, n),
                "tls": lambda n=nbytes: _ours(encrypted, n),
                "message": lambda n=nbytes: _ours(hosts, n, MESSAGES),
                "exchange": lambda n=nbytes: _exchanged(plain.client, n),
                "one host": lambda n=nbytes: _ours(one, n),
            }, 3 if quick else 9)  # fmt: skip
            peers = {EXCHANGE: times["exchange"], "one host": times["one host"]}
            if nbytes in over_mpi:
                peers[f"{over_mpi[nbytes][0]}, one host"] = [over_mpi[nbytes][1]]
            title = f"`all_reduce` of {NAMES[nbytes]}"
            figures.append(figure(title, times["hosts"], None, peers, times=(aim, EXCHANGE)))
            sent = {EXCHANGE: times["exchange"]}
            title_sent = f"a message of {NAMES[nbytes]}"
            figures.append(figure(title_sent, times["message"], None, sent, times=(SENT[nbytes], EXCHANGE)))
            figures.append(figure(f"{title}, over `tls://`", times["tls"], None, peers))
    missing = "" if over_mpi else f" {not_installed('mpi4py')}: `make mpi` puts it there."
    return Section(
        "Operations over two hosts",
        figures,
        "Float64; the slowest of 4 ranks, two on each host. An exchange: each worker sends the other as many "
        "bytes, by Dask's own connections, at the same time. The aims are 2.5 ms, 8 ms and 0.4 s, as many "
        f"times what an exchange took on the machine where they were set.{missing}",
    )
