"""How soon the notebook names what has died or stopped on a host."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import nbparallel as nbp
from benchmarks.cluster.turns import HOSTS, check, figure
from benchmarks.report import Section
from nbparallel.errors import ParallelError
from nbparallel.testing import processes
from tests.cluster.dask_cluster import DaskProcesses

DEATH_AIM, FREEZE_AIM = 1.0, 16.0
WAIT = "import time\ntime.sleep(60) if rank == 3 else barrier()"


def _rank(_: DaskProcesses, session: nbp.Session) -> Callable[[], None]:
    pid = session.run("import os; os.getpid()").values[3]
    return lambda: os.kill(pid, signal.SIGKILL)


def _node(dask: DaskProcesses, _: nbp.Session) -> Callable[[], None]:
    family = processes.family(dask.processes["b"].pid)
    (pid,) = (r.pid for r in family if "node_process" in r.command and r.parent == dask.processes["b"].pid)
    return lambda: os.kill(pid, signal.SIGKILL)


def _worker(dask: DaskProcesses, _: nbp.Session) -> Callable[[], None]:
    return lambda: dask.kill("b")


def _frozen(dask: DaskProcesses, _: nbp.Session) -> Callable[[], None]:
    return lambda: dask.signal("b", signal.SIGSTOP)


CASES = (
    ("rank 3 killed", _rank, DEATH_AIM, r"rank 3 \(host b\)"),
    ("a node killed", _node, DEATH_AIM, r"host b is lost, and ranks 2-3"),
    ("a worker killed", _worker, DEATH_AIM, r"host b is lost, and ranks 2-3"),
    ("a worker stopped", _frozen, FREEZE_AIM, r"host b is lost, and ranks 2-3"),
)
"""What happens, what does it, the aim, and what the error has to say."""


def _noticed(prepare: Callable[[DaskProcesses, nbp.Session], Callable[[], None]], text: str) -> float:
    with DaskProcesses(HOSTS) as dask, nbp.Session(cluster=dask.client) as session:
        check(session.run("rank").values, range(4))
        strike = prepare(dask, session)
        pending = session.submit(WAIT)
        time.sleep(0.5)
        began = time.perf_counter()
        strike()
        try:
            pending.result(40)
        except ParallelError as error:
            seconds = time.perf_counter() - began
            if not re.search(text, str(error)):
                raise RuntimeError(f"the error does not name it: {error}") from error
            return seconds
    raise RuntimeError("nothing was noticed")


def run(*, quick: bool) -> Section:
    """Measure each case on clusters of its own, in turns."""
    times: dict[str, list[float]] = {case[0]: [] for case in CASES}
    for turn in range(1 if quick else 5):
        for what, prepare, aim, text in CASES:
            if aim <= DEATH_AIM or turn < 2:  # minutes otherwise
                times[what].append(_noticed(prepare, text))
    return Section(
        "Losses on a host, until the notebook's cell has ended with an error that names them",
        [figure(what, times[what], aim) for what, _, aim, _ in CASES],
        "Ranks 0-2 wait in `barrier`, rank 3 sleeps. A host that gives no sign of life is lost after 15 s. "
        "A task of `client.submit` that is pinned to a killed worker waits without end.",
    )
