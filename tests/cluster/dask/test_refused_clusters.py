"""Clusters that cannot be used, or not in this way: each is refused with a message that says what to do."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import HostLostError, ParallelError, StartError
from nbparallel.testing.waiting import wait_until
from tests.cluster.dask_cluster import DaskProcesses
from tests.harness.clusters import session_messages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.time_limit(150),
    pytest.mark.may_leave("descriptor", "thread", reason="the client keeps connections with the scheduler"),
]
PATIENCE = 60.0


def test_what_cannot_be_used_is_refused(fresh: DaskProcesses, tmp_path: Path) -> None:
    """A closed or asynchronous client; a host without nbparallel, which is named; a worker that is paused."""
    from distributed import Client

    closed = Client(scheduler_file=fresh.scheduler_file)
    closed.close()
    with pytest.raises(ValueError, match="the client is closed"):
        nbp.Session(cluster=closed)
    (tmp_path / "nbparallel").mkdir()
    (tmp_path / "nbparallel" / "__init__.py").write_text("raise ImportError('not here')")
    fresh.start_worker("c", {"PYTHONPATH": str(tmp_path)})
    fresh.await_workers(3)
    with pytest.raises(StartError, match=r"host slurm-0/1: nbparallel cannot be used there .*PipInstall"):
        nbp.Session(cluster=fresh.client).start()
    with pytest.raises(ValueError, match="9 ranks do not fit these hosts, which take 4: 2 on a, 2 on b"):
        nbp.Session(9, cluster=fresh.client, max_hosts=2)


def _change_status(monkeypatch: pytest.MonkeyPatch, scheduler: Any, status: str, *names: str) -> None:
    """Have the scheduler say another status of the workers of these names in a plain answer; or list none."""
    known = scheduler.identity

    async def identity(**options: Any) -> Any:
        found = await known(**options)
        if not options:  # not the client's own question, which waits for a worker that runs
            for worker in found["workers"].values():
                worker["status"] = status if worker["name"] in names else worker["status"]
            found["workers"] = found["workers"] if names else {}
            found["id"] += "again" * (status == "restarted")
        return found

    monkeypatch.setattr(scheduler, "identity", identity, raising=False)


def test_a_paused_worker_and_an_empty_cluster_are_refused(
    dask: DaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the host's name; after a time in which a first worker can come."""
    import distributed

    from nbparallel.cluster.dask import dask_cluster

    adapter = dask_cluster.DaskCluster(dask.client)
    _change_status(monkeypatch, dask.client.scheduler, "paused", "b")
    with pytest.raises(StartError, match="host b takes no tasks: its workers are paused"):
        adapter.anchor("b")
    _change_status(monkeypatch, dask.client.scheduler, "gone")
    monkeypatch.setattr(dask_cluster, "WORKERS_SECONDS", 1.0)
    with pytest.raises(StartError, match="had no worker in 1 s: scale it up"):
        adapter.hosts()
    monkeypatch.setattr(distributed, "LocalCluster", type(dask.client.cluster))
    with pytest.raises(StartError, match=r"in 1 s: Stop ends the workers of a LocalCluster.*processes=False"):
        adapter.hosts()
    _change_status(monkeypatch, dask.client.scheduler, "restarted")
    with pytest.raises(StartError, match=r"restarted.*%parallel_stop, then %parallel_cluster"):
        adapter.hosts()
    monkeypatch.undo()
    adapter.close()
    monkeypatch.setattr(dask_cluster, "WORKERS_SECONDS", 1.0)
    with DaskProcesses("") as empty, pytest.raises(StartError, match="had no worker in"):
        nbp.Session(cluster=empty.client)


async def _asynchronous(of: Any) -> None:
    from distributed import Client

    async with Client(of.scheduler.address, asynchronous=True, security=of.security) as client:
        with pytest.raises(TypeError, match="asynchronous=True"):
            nbp.Session(cluster=client)


def test_an_asynchronous_client_is_refused(dask: DaskProcesses) -> None:
    """Its loop is the caller's own thread."""
    asyncio.run(_asynchronous(dask.client))


def test_a_forked_child_is_refused(dask: DaskProcesses) -> None:
    """The client's thread is not there, and nothing waits for it."""
    end, start = os.pipe()
    child = os.fork()
    if not child:
        try:
            nbp.Session(cluster=dask.client)
        except BaseException as error:  # noqa: BLE001  the parent looks at it
            os.write(start, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(start)
    with open(end) as said:
        assert "forked" in said.read()
    os.waitpid(child, 0)


def test_two_workers_of_one_machine_are_one_host() -> None:
    """One node with the ranks of both, under the name of the first; it lives as long as its own worker."""
    with DaskProcesses("") as cluster:
        for name, threads in (("a2", 1), ("a1", 2)):
            cluster.start_worker("a", name=name, threads=threads)
        cluster.start_worker("b")
        cluster.await_workers(3)
        with nbp.Session(cluster=cluster.client) as session:
            found = session.run("import os; os.environ['GROUP_RANK'], os.environ['LOCAL_RANK']").values
            assert found == [("0", "0"), ("0", "1"), ("0", "2"), ("1", "0"), ("1", "1")]
            assert session.hosts == {"a1": range(3), "b": range(3, 5)}
            assert len(set(session.run("os.getppid()", ranks=[0, 1, 2]).values)) == 1
            cluster.kill("a1")
            wait_until(lambda: not session_messages(session).empty(), seconds=PATIENCE)
            result = session.run("all_reduce(rank)")  # the other worker of that machine is there
            assert result.values == [10] * 5
            assert any("host a1 was lost" in note and "on host a2" in note for note in result.notes)


def _unreachable(address: str) -> None:
    """Have connections from the worker that runs this to another one never come about."""
    from distributed.comm.tcp import TCPConnector

    connect = TCPConnector.connect

    async def never(self: Any, to: str, *rest: Any, **options: Any) -> Any:
        if to in address:
            await asyncio.sleep(1000)
        return await connect(self, to, *rest, **options)

    TCPConnector.connect = never


def test_workers_that_cannot_reach_each_other(fresh: DaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are named, and the reason; nothing is left of the session, and one host alone can be used."""
    from nbparallel.cluster import host_pool

    monkeypatch.setattr(host_pool, "LINK_SECONDS", 2.0)
    fresh.client.run(_unreachable, fresh.address_of("b"), workers=[fresh.address_of("a")])
    session = nbp.Session(cluster=fresh.client)
    began = time.monotonic()
    with pytest.raises(StartError, match=r"the workers of hosts a and b cannot reach each other: \w+"):
        session.run("rank")
    assert time.monotonic() - began < 20
    session.stop()
    with nbp.Session(cluster=fresh.client, max_hosts=1) as alone:
        assert alone.run("all_reduce(rank)").values == [1, 1]


def _start_programs(program: str) -> str:
    """Have the worker that runs it start nodes by another program; return the one before."""
    from nbparallel.cluster import node_process

    former, node_process.PROGRAM = node_process.PROGRAM, program
    return former


def test_a_node_that_cannot_start(dask: DaskProcesses) -> None:
    """The error names the host, says how its process ended, and has its last lines."""
    program = "import sys; print('the last words of this process', file=sys.stderr); sys.exit(3)"
    former = next(iter(dask.client.run(_start_programs, program).values()))
    wanted = r"(?s)host [ab]: its process ended \(exit code 3\).*the last words of this process"
    with pytest.raises(StartError, match=wanted), nbp.Session(cluster=dask.client) as session:
        session.run("1")
    dask.client.run(_start_programs, former)
    with nbp.Session(cluster=dask.client) as session:
        assert session.run("all_reduce(rank)").values == [6] * 4


def _fill(dask_worker: Any = None) -> None:
    """Have a worker's own look at its memory find it full."""
    dask_worker.memory_manager.memory_pause_fraction = 1e-9


def test_a_worker_that_pauses(fresh: DaskProcesses) -> None:
    """As one does whose memory is nearly full: refused at the start, no matter to a session that runs."""
    address = fresh.address_of("b")
    with nbp.Session(cluster=fresh.client) as session:
        session.run("pass")
        fresh.client.run(_fill, workers=[address])
        assert session.run("all_reduce(rank)").values == [6] * 4
    wait_until(lambda: fresh.workers()[address]["status"] == "paused")
    with pytest.raises(StartError, match="host b takes no tasks: its workers are paused"):
        nbp.Session(cluster=fresh.client).start()


def test_a_worker_that_has_just_registered(fresh: DaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is still `init` where the session looks; it takes tasks as soon as it runs."""
    _change_status(monkeypatch, fresh.client.scheduler, "init", "a", "b")
    with nbp.Session(cluster=fresh.client) as session:
        assert session.run("all_reduce(rank)").values == [6] * 4


def _have_another_system() -> None:
    """Have the worker that runs it say that it is no Linux."""
    platform.system = lambda: "Darwin"


def test_a_worker_that_is_not_on_linux(fresh: DaskProcesses) -> None:
    """Its host is named, and what it runs; without it the session starts."""
    fresh.client.run(_have_another_system, workers=[fresh.address_of("b")])
    with pytest.raises(StartError, match="host b runs Darwin, and ranks need Linux"):
        nbp.Session(cluster=fresh.client).start()
    with nbp.Session(cluster=fresh.client, max_hosts=1) as session:
        assert session.run("all_reduce(rank)").values == [1] * 2


def test_foreign_events(fresh: DaskProcesses) -> None:
    """Whatever other clients log to a session's topic is dropped."""
    with nbp.Session(cluster=fresh.client) as session:
        session.run("print(1)")
        other = fresh.connect()
        topics = [topic for topic in other.get_events() if str(topic).startswith("nbp-")]
        assert len(topics) == 1
        for message in ("text", {"key": 5}, {"key": f"{topics[0]}/0/a"}, {"data": b"1"}, None):
            other.log_event(topics[0], message)
        other.close()
        assert session.run("all_reduce(rank)").values == [6] * 4


def test_a_session_inside_a_rank(fresh: DaskProcesses) -> None:
    """A rank starts none on the cluster that it is on."""
    with nbp.Session(cluster=fresh.client, ranks_per_host=1) as session:
        cell = f"""
from distributed import Client
with Client(scheduler_file={fresh.scheduler_file!r}) as client:
    nbp.Session(cluster=client)
"""
        with pytest.raises(ParallelError, match="rank"):
            session.run(cell, ranks=[0])


@pytest.fixture
def nannies() -> Any:
    """Start a cluster whose workers have a nanny and little memory."""
    pytest.importorskip("distributed", reason="distributed is not installed: `make dask` puts it there")
    with DaskProcesses("ab", "--memory-limit", "300MB", nanny=True) as cluster:
        yield cluster


def test_shared_arrays_are_not_the_memory_of_a_worker(nannies: DaskProcesses) -> None:
    """More of them than its nanny allows it; one that takes too much itself is killed, and comes back."""
    with nbp.Session(cluster=nannies.client) as session:
        names: dict[str, Any] = {f"x{i}": np.full(8_000_000, float(i)) for i in range(3)}
        cell = "kept = rank; " + " + ".join(f"x{i}[-1]" for i in range(3))
        assert session.run(cell, namespace=names).values == [3.0] * 4
        assert session.run("kept").values == [0, 1, 2, 3]
        eater = nannies.client.submit(_eat, workers=["b"], retries=0, pure=False)
        wait_until(lambda: not session_messages(session).empty(), seconds=PATIENCE)
        eater.cancel()  # it would be tried again
        assert session.run("kept", ranks=[0, 1]).values == [0, 1]
        nannies.await_workers(2)
        assert session.run("all_reduce(rank)", namespace=names).values == [6] * 4


def _eat() -> int:
    found = []
    for _ in range(100):
        found.append(np.ones(2_500_000))
        time.sleep(0.1)
    return len(found)


def test_restarting_the_cluster_loses_every_host(nannies: DaskProcesses) -> None:
    """All variables are gone, and a line says so; the ranks run again on the new workers."""
    with nbp.Session(cluster=nannies.client) as session:
        session.run("kept = rank")
        pending = session.submit("import time; time.sleep(60)")
        time.sleep(0.5)
        nannies.client.restart()
        with pytest.raises(ParallelError, match=r"HostLostError.*host [ab] is lost") as caught:
            pending.result(PATIENCE)
        assert all(isinstance(error, HostLostError) for error in caught.value.errors.values())
        result = session.run("'kept' in globals(), all_reduce(rank)")
        assert result.values == [(False, 6)] * 4
        assert all(f"host {host} was lost" in "".join(result.notes) for host in "ab")
