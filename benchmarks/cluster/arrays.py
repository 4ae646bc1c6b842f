"""Arrays of the notebook on their way to two hosts: seconds, and what workers keep of them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import nbparallel as nbp
from benchmarks.cluster.turns import HOSTS, RANKS, check, figure, take_turns, workers_of
from benchmarks.report import Figure, Section
from nbparallel.cluster.host_dispatch import PIECE_NBYTES, WINDOW
from tests.cluster.dask_cluster import DaskProcesses

NBYTES = 64 << 20
PUSHED = 16
"""Arrays of that size: a gigabyte."""
AIM_SECONDS, AIM_GROWTH = 0.4, 16 << 20
Array = npt.NDArray[np.float64]


def memory(pid: int, what: str) -> int:
    """Return bytes of resident memory of a process: ``VmRSS`` now, ``VmHWM`` at most."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0 if found is None else int(found[1]) << 10


def _growth(dask: DaskProcesses, session: nbp.Session) -> Figure:
    """Return how much the workers' memory grows while a gigabyte passes them."""
    pids = [dask.processes[host].pid for host in HOSTS]
    before = [memory(pid, "VmRSS") for pid in pids]
    for number in range(PUSHED):
        x = np.full(NBYTES // 8, float(number))
        check(session.run("float(x[-1])", namespace={"x": x}).values, [float(number)] * RANKS)
    grown = [memory(pid, "VmHWM") - was for pid, was in zip(pids, before, strict=True)]
    return Figure(
        f"a worker's memory at most, while {PUSHED * NBYTES >> 30} GB passes it",
        " and ".join(f"{nbytes / (1 << 20):.1f} MB more" for nbytes in grown),
        aim=f"≤ {AIM_GROWTH >> 20} MB",
        met=max(grown) <= AIM_GROWTH,
    )


def _take_nothing(dask_worker: Any) -> None:
    """Add a handler that takes bytes and forgets them; runs on a worker."""

    async def take(data: Any) -> int:
        return len(data)

    dask_worker.handlers["benchmark_take"] = take


class _Dask:
    """The same bytes by means of Dask."""

    def __init__(self, client: Any) -> None:
        self._client, self._workers = client, workers_of(client)
        client.run(_take_nothing)

    def submit(self, x: Array) -> None:
        futures = [self._client.submit(np.size, x, workers=[w], pure=False) for w in self._workers]
        check(self._client.gather(futures), [x.size] * len(self._workers))

    def scatter(self, x: Array) -> None:
        self._client.scatter(x, workers=self._workers, broadcast=True, hash=False)

    def broadcast(self, x: Array) -> None:
        """Send pieces as large as ours, as many at a time, to handlers that forget them."""
        self._client.sync(self._broadcast, x.view(np.uint8).data)

    async def _broadcast(self, content: memoryview) -> None:
        from distributed.protocol import to_serialize

        starts = iter(range(0, len(content), PIECE_NBYTES))

        async def send() -> None:
            for start in starts:
                data: Any = to_serialize(bytes(content[start : start + PIECE_NBYTES]))
                await self._client.scheduler.broadcast(
                    msg={"op": "benchmark_take", "data": data}, workers=self._workers
                )

        await asyncio.gather(*(send() for _ in range(WINDOW)))


def run(*, quick: bool) -> Section:
    """Measure; a new array each time."""
    with DaskProcesses(HOSTS) as dask, nbp.Session(cluster=dask.client) as hosts, nbp.Session(RANKS) as one:
        for session in (hosts, one):
            x = np.arange(float(NBYTES // 8))
            check(session.run("float(x.sum())", namespace={"x": x}).values, [float(x.sum())] * RANKS)
        theirs = _Dask(dask.client)
        growth = _growth(dask, hosts)

        def timed(send: Callable[[Array], object]) -> Callable[[], float]:
            def call() -> float:
                x = np.full(NBYTES // 8, time.time())
                began = time.perf_counter()
                send(x)
                return time.perf_counter() - began

            return call

        times = take_turns({
            "hosts": timed(lambda x: hosts.run("x.nbytes", namespace={"x": x})),
            "one host": timed(lambda x: one.run("x.nbytes", namespace={"x": x})),
            "client.submit": timed(theirs.submit),
            "client.scatter": timed(theirs.scatter),
            "broadcast": timed(theirs.broadcast),
        }, 3 if quick else 9)  # fmt: skip
    peers = {
        "`client.scatter(broadcast=True)`": times["client.scatter"],
        "`client.submit` on both": times["client.submit"],
        "`scheduler.broadcast` of the same pieces, which are forgotten": times["broadcast"],
        "one host": times["one host"],
    }
    return Section(
        "A 64 MB array of the notebook on two hosts",
        [figure("first cell that names it", times["hosts"], AIM_SECONDS, peers), growth],
        f"In pieces of {PIECE_NBYTES >> 20} MiB, {WINDOW} at a time; a new array in each round.",
    )
