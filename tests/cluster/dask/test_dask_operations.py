"""Operations over hosts on a real Dask cluster: frames pass nodes and workers."""

from __future__ import annotations

import time

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError, PeerFailedError
from tests.cluster.dask_cluster import DaskProcesses
from tests.cluster.host_conformance import HostInterruptsTests, HostOperationsTests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.time_limit(150),
    pytest.mark.may_leave(
        "descriptor", "thread", reason="the client keeps connections, and Dask a thread for large messages"
    ),
]
PATIENCE = 60.0


@pytest.mark.parametrize("hosts", [2, 3], ids=["2+2", "3+1"], indirect=True)
class TestDask(HostOperationsTests):
    """On workers."""


class TestDaskInterrupts(HostInterruptsTests):
    """Through the scheduler."""


def test_large_arrays(hosts: nbp.Session) -> None:
    """Many frames of 1 MiB, in both directions at once."""
    cell = "x = np.full(4_000_000, float(rank)); all_reduce(x); y = broadcast(x if rank == 3 else None, 3)"
    cell += "\n(x[0], x[-1], float(y.sum()))"
    assert hosts.run(cell, namespace={"np": np}).values == [(6.0, 6.0, 24_000_000.0)] * 4


def test_a_failure_and_an_interrupt(hosts: nbp.Session) -> None:
    """Ranks that wait for another host are freed, and the next cell works."""
    names = {"PeerFailedError": PeerFailedError}
    cell = """
import time
if rank == 3:
    time.sleep(0.3)
    raise ZeroDivisionError("on purpose")
try:
    barrier()
except PeerFailedError as error:
    text = str(error)
"""
    with pytest.raises(ParallelError, match="ZeroDivisionError on rank 3"):
        hosts.run(cell, namespace=names)
    assert all("rank 3 (host b) failed" in text for text in hosts.run("text", ranks=[0, 1, 2]).values)
    assert hosts.run("all_reduce(rank)").values == [6] * 4
    pending = hosts.submit("import time\nif rank == 3: time.sleep(60)\nbarrier()")
    time.sleep(0.5)
    pending.cancel()
    with pytest.raises(KeyboardInterrupt):
        pending.result(PATIENCE)
    assert hosts.run("all_reduce(rank)").values == [6] * 4


def test_a_killed_worker(fresh: DaskProcesses) -> None:
    """Ranks that wait for its host are told; another worker of that name takes part in the next cell."""
    with nbp.Session(cluster=fresh.client) as session:
        session.run("barrier()")
        pending = session.submit("import time\nif rank > 1: time.sleep(60)\nbarrier()")
        time.sleep(0.5)
        fresh.kill("b")
        with pytest.raises(ParallelError, match=r"HostLostError on ranks 2-3 \(host b\): host b is lost"):
            pending.result(PATIENCE)
        fresh.start_worker("b")
        fresh.await_workers(2)
        assert session.run("all_gather(rank)").values == [[0, 1, 2, 3]] * 4
