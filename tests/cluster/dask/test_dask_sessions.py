"""Sessions on real Dask clusters: cells, interrupts, losses; nobody hangs, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import HostLostError, ParallelError
from nbparallel.testing.processes import read
from nbparallel.testing.waiting import wait_until
from tests.cluster.dask_cluster import DaskProcesses
from tests.harness.clusters import session_messages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.time_limit(150),
    pytest.mark.may_leave(
        "descriptor", "thread", reason="the client keeps connections, and Dask a thread for large messages"
    ),
]
PATIENCE = 60.0


def _pids(session: nbp.Session) -> list[int]:
    return list(session.run("import os; os.getpid()").values)


def _gone(pids: list[int]) -> None:
    wait_until(
        lambda: not [pid for pid in pids if read(pid)], lambda: [read(p) for p in pids], seconds=PATIENCE
    )


def test_cells_values_output_and_names(hosts: nbp.Session) -> None:
    """Ranks are on the hosts that the cluster has, numbered by their workers' names."""
    big = np.arange(400_000.0)
    result = hosts.run("print('hi', rank)\nfloat(big.sum()) + rank", namespace={"big": big})
    assert result.values == [big.sum() + rank for rank in range(4)]
    assert [each.stdout for each in result] == [f"hi {rank}\n" for rank in range(4)]
    assert hosts.run("all_gather(rank, group=dist.host_group())").values == [[0, 1]] * 2 + [[2, 3]] * 2
    assert hosts.run("all_gather(rank)").values == [[0, 1, 2, 3]] * 4
    assert all(np.array_equal(x, big) for x in hosts.run("big", namespace={"big": big}).values)
    lines = hosts.run("for i in range(5000): print(i)")
    assert all(each.stdout.split() == [str(i) for i in range(5000)] for each in lines)


def test_a_worker_never_holds_an_array(dask: DaskProcesses, hosts: nbp.Session) -> None:
    """It passes in pieces, into memory of the node; what is written into it comes when it is pushed."""

    def most() -> int:
        text = Path(f"/proc/{dask.processes['a'].pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) << 10

    before = most()
    names: dict[str, Any] = {}
    for number in range(2):
        names["x"] = np.full(8 << 20, float(number))
        assert hosts.run("float(x[-1]), x.flags.writeable", namespace=names).values == [(number, False)] * 4
        assert most() - before < 16 << 20
    names["x"][-1] = 7.0
    assert hosts.run("float(x[-1])", namespace=names).values == [1.0] * 4
    hosts.push_names("x", names)
    assert hosts.run("float(x[-1])", namespace=names).values == [7.0] * 4


def test_errors_and_interrupts(hosts: nbp.Session) -> None:
    """Both arrive where they are looked for."""
    with pytest.raises(ParallelError, match=r"ZeroDivisionError on rank 2 \(host b\), line 1"):
        hosts.run("1 / (rank - 2)")
    with pytest.raises(ParallelError, match="HostBoundaryError"):
        hosts.run("send(nbp.zeros(1), (rank + 2) % 4, view=True)")
    pending = hosts.submit("import time; time.sleep(60)")
    time.sleep(0.5)
    pending.cancel()
    with pytest.raises(KeyboardInterrupt):
        pending.result(PATIENCE)
    with pytest.raises(ParallelError, match=r"RankDiedError: rank 1 \(host a\)"):
        hosts.run("import os\nif rank == 1: os.kill(os.getpid(), 9)")
    assert hosts.run("rank").values == [0, 1, 2, 3]


def test_tasks_of_dask_and_another_session_run_beside(dask: DaskProcesses, hosts: nbp.Session) -> None:
    """Two sessions do not meet, and the anchors take no thread of the workers."""
    hosts.run("mine = 'first'")
    with nbp.Session(cluster=dask.client, ranks_per_host=1) as other:
        other.run("mine = 'second'")
        futures = dask.client.map(lambda x: x + 1, range(8), pure=False)
        assert dask.client.gather(futures) == list(range(1, 9))
        assert other.pull("mine") == ["second"] * 2
        del futures
    assert hosts.pull("mine") == ["first"] * 4


def test_stopping_leaves_nothing(dask: DaskProcesses) -> None:
    """Every rank and node has ended when `stop` returns; a client of the user's goes on."""
    session = nbp.Session(cluster=dask.client)
    pids = _pids(session)
    session.stop()
    _gone(pids)
    assert dask.client.status == "running"
    assert dask.client.submit(lambda: 5, pure=False).result(PATIENCE) == 5


def test_a_killed_worker_is_named_and_replaced(fresh: DaskProcesses) -> None:
    """Its ranks end with it, other hosts keep their variables; a worker of that name has the ranks again."""
    with nbp.Session(cluster=fresh.client) as session:
        session.run("kept = rank")
        pids = _pids(session)
        pending = session.submit("import time; time.sleep(1 if rank < 2 else 60)")
        time.sleep(0.5)
        fresh.kill("b")
        with pytest.raises(ParallelError, match="HostLostError") as caught:
            pending.result(PATIENCE)
        lost = caught.value.errors[2]
        assert isinstance(lost, HostLostError)
        assert (lost.host, lost.ranks) == ("b", (2, 3))
        _gone(pids[2:])
        with pytest.raises(HostLostError, match=r"use ranks=\[0, 1\]"):
            session.run("1")
        assert session.run("kept", ranks=[0, 1]).values == [0, 1]
        fresh.start_worker("b")
        fresh.await_workers(2)
        result = session.run("'kept' in globals(), rank")
        assert result.values == [(True, 0), (True, 1), (False, 2), (False, 3)]
        assert any("host b was lost" in note and "variables of ranks 2-3" in note for note in result.notes)


def test_a_killed_node_is_a_lost_host(fresh: DaskProcesses) -> None:
    """The worker lives, and a new node starts on it."""
    with nbp.Session(cluster=fresh.client) as session:
        pids = _pids(session)
        supervisor = read(pids[2]).parent  # type: ignore[union-attr]
        os.kill(read(supervisor).parent, signal.SIGKILL)  # type: ignore[union-attr]
        _gone(pids[2:])
        wait_until(lambda: not session_messages(session).empty(), seconds=PATIENCE)
        result = session.run("rank")
        assert result.values == [0, 1, 2, 3]
        assert any("host b was lost" in note for note in result.notes)


def test_a_terminated_worker_takes_its_ranks_along(fresh: DaskProcesses) -> None:
    """As a scheduler of batch jobs ends one."""
    with nbp.Session(cluster=fresh.client) as session:
        pids = _pids(session)
        fresh.signal("b", signal.SIGTERM)
        _gone(pids[2:])
        wait_until(lambda: not session_messages(session).empty(), seconds=PATIENCE)
        with pytest.raises(HostLostError):
            session.run("1")


def test_a_frozen_worker_is_given_up(fresh: DaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """By silence; when it goes on, its ranks end."""
    from nbparallel.cluster import host_dispatch

    monkeypatch.setattr(host_dispatch, "MOST_LOOKS", 6)
    with nbp.Session(cluster=fresh.client) as session:
        pids = _pids(session)
        pending = session.submit("import time; time.sleep(1 if rank < 2 else 90)")
        time.sleep(0.5)
        fresh.signal("b", signal.SIGSTOP)
        with pytest.raises(ParallelError, match=r"HostLostError.*has not answered"):
            pending.result(PATIENCE)
        assert session.run("rank", ranks=[0, 1]).values == [0, 1]
        fresh.signal("b", signal.SIGCONT)
        _gone(pids[2:])


def test_a_lost_scheduler_is_named(fresh: DaskProcesses) -> None:
    """Workers end with it, and ranks with them: no new cell, and no wait."""
    with nbp.Session(cluster=fresh.client) as session:
        pids = _pids(session)
        pending = session.submit("import time; time.sleep(60)")
        time.sleep(0.5)
        fresh.kill("scheduler")
        with pytest.raises(ParallelError, match=r"HostLostError.*scheduler is gone"):
            pending.result(PATIENCE)
        with pytest.raises(nbp.NbParallelError, match=r"scheduler"):
            session.run("1")
        _gone(pids)


_KERNEL = """
import sys
from distributed import Client
import nbparallel as nbp
client = Client(scheduler_file=sys.argv[1])
session = nbp.Session(cluster=client)
print(*session.run("import os; os.getpid()").values, flush=True)
session.run("import time; time.sleep(100)")
"""


def test_a_killed_kernel_leaves_nothing(dask: DaskProcesses, tmp_path: Path) -> None:
    """The scheduler releases the anchors, and every rank ends; the workers go on."""
    script = tmp_path / "kernel.py"
    script.write_text(_KERNEL)
    words = [sys.executable, str(script), dask.scheduler_file]
    environment = {**os.environ, **dask.environment}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as kernel:
        assert kernel.stdout is not None
        pids = [int(word) for word in kernel.stdout.readline().split()]
        kernel.kill()
    assert len(pids) == 4
    _gone(pids)
    assert dask.client.submit(lambda: 5, pure=False).result(PATIENCE) == 5


def test_all_hosts_while_the_client_renews_what_it_knows(dask: DaskProcesses) -> None:
    """It does so by itself every two seconds, here all the time, and then knows no worker."""
    from dask import config

    from nbparallel.cluster.dask.dask_cluster import DaskCluster

    there = sorted(worker["name"] for worker in dask.workers().values())
    with config.set({"distributed.client.scheduler-info-interval": "1ms"}), dask.connect() as client:
        adapter = DaskCluster(client)
        for _ in range(100):
            assert list(adapter.hosts()) == there
        adapter.close()
