"""Faults of a real cluster, and moments in which they happen; the host that is hit is b."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.cluster.host_messages import NodeReply
from nbparallel.testing.processes import family
from nbparallel.testing.waiting import wait_until
from tests.cluster.dask_cluster import DaskProcesses

FAULTS = [
    "kill rank", "kill node", "kill worker", "kill scheduler", "freeze worker", "freeze node", "close link",
]  # fmt: skip
MOMENTS = ["start", "idle", "cell", "exchange", "message", "array"]
PATIENCE = 90.0
EXCHANGE = "x = np.full(300_000, 1.0 * rank)\nwhile True: all_reduce(x, 'max')"
MESSAGES = EXCHANGE.replace("all_reduce(x, 'max')", "x = sendrecv(x, (rank + 2) % 4, (rank + 2) % 4)")
CELLS = {"cell": "import time; time.sleep(1.5)", "exchange": EXCHANGE, "message": MESSAGES}


def below(pid: int, generations: int) -> list[int]:
    """Return the processes so many generations below one, older ones first: nodes, their supervisors, ranks.

    A supervisor's oldest child is the template of its ranks.
    """
    found = [pid]
    for _ in range(generations):
        records = [record for parent in found for record in family(parent) if record.parent == parent]
        found = [record.pid for record in sorted(records, key=lambda record: record.started)]
    return found


def all_below(pid: int) -> list[int]:
    """Return every process below one."""
    return [record.pid for record in family(pid)]


def close_connections(address: str) -> None:
    """Break the connections of the worker that runs it with another one, as a network does."""
    from distributed.comm.tcp import TCP

    for thing in gc.get_objects():
        if issubclass(type(thing), TCP) and not thing.closed() and thing.peer_address == address:
            thing.abort()


def strike(cluster: DaskProcesses, fault: str) -> None:
    """Have a fault happen, now."""
    what, _, whom = fault.partition(" ")
    worker = cluster.processes["b"].pid
    if whom == "link":
        near, far = cluster.address_of("a"), cluster.address_of("b")
        cluster.client.run(close_connections, far, workers=[near])
    elif whom == "scheduler":
        cluster.kill(whom)
    else:
        pids = {
            "rank": lambda: below(worker, 3)[1:][-1:],  # the template alone is none
            "node": lambda: below(worker, 1),
            "worker": lambda: [worker],
        }
        (pid,) = wait_until(pids[whom])
        os.kill(pid, signal.SIGSTOP if what == "freeze" else signal.SIGKILL)


@contextmanager
def striking_at(moment: str, cluster: DaskProcesses, fault: str) -> Iterator[None]:
    """Have a fault happen while a session starts, or while an array is on its way; once."""
    from nbparallel.cluster.dask.dask_cluster import DaskCluster

    call, link, once = DaskCluster.call, DaskCluster.link, threading.Lock()
    striking: list[threading.Thread] = []

    def calling(
        self: DaskCluster, op: str, data: Mapping[str, bytes], timeout: float
    ) -> dict[str, NodeReply]:
        hit = op == {"start": "start", "array": "fill"}.get(moment) and fault != "close link"
        if hit and once.acquire(blocking=False):
            beside = threading.Thread(target=strike, args=(cluster, fault))
            beside.start()  # a rank is there some time after its host was asked to start it
            striking.append(beside)
            if moment == "array" or fault != "kill rank":
                beside.join()
        return call(self, op, data, timeout)

    def linking(self: DaskCluster, *ends: Any) -> None:
        link(self, *ends)
        if moment == "start" and fault == "close link" and once.acquire(blocking=False):
            strike(cluster, fault)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DaskCluster, "call", calling)
        patch.setattr(DaskCluster, "link", linking)
        yield
        for thread in striking:
            thread.join(PATIENCE)


def perform(
    moment: str,
    cluster: DaskProcesses,
    session: nbp.Session,
    fault: str,
    within: AbstractContextManager[None] | None = None,
) -> tuple[BaseException | None, float]:
    """Do what belongs to a moment, in which a fault happens; return what it raised, and the seconds after.

    `within` bounds what is measured.
    """
    names: dict[str, Any] = {"big": np.ones(4_000_000), "np": np}
    calls: dict[str, Callable[[], object]] = {
        "start": session.start,
        "array": lambda: session.run("float(big.sum())", namespace=names),
        "idle": lambda: session.run("rank"),
    }
    if moment in CELLS:
        pending = session.submit(CELLS[moment], namespace=names)
        time.sleep(0.5)
        calls[moment] = lambda: pending.result(PATIENCE)
    if moment == "idle" or moment in CELLS:
        strike(cluster, fault)
    with striking_at(moment, cluster, fault), within or nullcontext():
        began = time.monotonic()
        return error_of(calls[moment]), time.monotonic() - began


def error_of(call: Callable[[], object]) -> BaseException | None:
    """Return what a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return error
    return None
