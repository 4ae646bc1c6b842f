"""Hosts that are lost, stay silent, cannot start or send what is damaged: the others go on, nothing hangs."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import nbparallel as nbp
from nbparallel.cluster.node import Node
from nbparallel.errors import HostLostError, ParallelError, StartError
from nbparallel.session.processes import launch
from nbparallel.testing.waiting import wait_until
from tests.cluster.sink import Sink
from tests.harness.clusters import Loopback, session_messages

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(60)]


@pytest.fixture
def cluster() -> Loopback:
    """Return a cluster of two hosts with a rank each."""
    return Loopback(["a", "b"], cpus=1)


def replace_call(patch: pytest.MonkeyPatch, op: str, call: Callable[..., bytes]) -> None:
    """Have ``call(node, handle, op, data)`` handle one of the kernel's calls on every node."""
    handle = Node.handle

    def handled(node: Node, name: str, data: bytes) -> bytes:
        return call(node, handle, op, data) if name == op else handle(node, name, data)

    patch.setattr(Node, "handle", handled)


def test_a_lost_host_is_named_and_the_others_go_on(cluster: Loopback) -> None:
    """The cell ends, the other host keeps its variables; without another host its ranks are refused."""
    with nbp.Session(cluster=cluster) as session:
        session.run("kept = rank")
        pending = session.submit("import time; time.sleep(0.5 + 30 * rank)")
        time.sleep(0.2)
        cluster.lose("b", "its worker was killed")
        with pytest.raises(ParallelError, match="HostLostError: host b is lost") as caught:
            pending.result(20)
        error = caught.value.errors[1]
        assert isinstance(error, HostLostError)
        assert (error.host, error.ranks, error.reason) == ("b", (1,), "its worker was killed")
        with pytest.raises(HostLostError, match=r"no host is unused: start a worker, or use ranks=\[0\]"):
            session.run("rank")
        assert session.run("kept", ranks=[0]).values[0] == 0


def test_restart_of_all(cluster: Loopback) -> None:
    """No rank has variables; the notebook's names are sent again."""
    names = {"a": 1}
    with nbp.Session(cluster=cluster) as session:
        session.run("kept = a", namespace=names)
        session.restart()
        assert session.run("'kept' in globals(), a", namespace=names).values == [(False, 1)] * 2


def test_an_unused_host_takes_the_ranks_over() -> None:
    """Same numbers; a line says whose variables are gone, and the notebook's names are sent again."""
    cluster = Loopback(["a", "b", "c"], cpus=1)
    names = {"a": 3}
    with nbp.Session(cluster=cluster, max_hosts=2) as session:
        session.run("kept = rank; a", namespace=names)
        cluster.lose("b")
        result = session.run("'kept' in globals(), rank, a", namespace=names)
        assert result.values == [(True, 0, 3), (False, 1, 3)]
        assert any("host b was lost" in note and "again, on host c" in note for note in result.notes)
        with pytest.raises(ParallelError, match=r"rank 1 \(host c\)"):
            session.run("1 / (rank - 1)")
        with pytest.raises(ParallelError, match=r"on host a needs rank 1 \(host c\)"):
            session.run("if rank == 0: send(nbp.zeros(1), 1, view=True)")
        assert session.run("kept", ranks=[0]).values[0] == 0


def test_a_loss_that_is_known_only_when_hosts_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken link may be seen first: the host is replaced, as if its loss had been seen before."""
    cluster, link = Loopback(["a", "b", "c"], cpus=1), Loopback.link

    def lose_first(self: Loopback, *ends: Any) -> None:
        monkeypatch.undo()
        self.lose("b")
        link(self, *ends)

    with nbp.Session(cluster=cluster, max_hosts=2) as session:
        session.run("barrier()")
        cluster.nodes["a"].break_link("b")
        wait_until(lambda: session_messages(session).qsize() == 2)
        monkeypatch.setattr(Loopback, "link", lose_first)
        result = session.run("all_gather(rank)")
        assert result.values == [[0, 1]] * 2
        assert any("again, on host c" in note for note in result.notes)


def test_a_host_that_stays_silent_is_given_up(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note first, then it is lost; a host that computes for long answers."""
    from nbparallel.cluster import host_dispatch

    monkeypatch.setattr(host_dispatch, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(host_dispatch, "MOST_LOOKS", 8)
    sink = Sink()
    with nbp.Session(cluster=cluster) as session:
        session.run("import time; time.sleep(2)", ranks=[0])
        pending = session.submit("import time; time.sleep(0.5 + 30 * rank)", sink=sink)
        wait_until(lambda: session_messages(session).empty())
        cluster.nodes["b"].frozen.set()
        with pytest.raises(ParallelError, match=r"HostLostError: host b is lost.*has not answered"):
            pending.result(20)
        assert any("host b has not answered" in note for note in sink.notes)
        with pytest.raises(HostLostError, match="its worker is not used again, and no host is unused"):
            session.run("1")
        assert session.run("rank", ranks=[0]).values[0] == 0


def test_stopping_while_a_cell_runs(cluster: Loopback) -> None:
    """Whoever waits for the cell is told; every node has ended."""
    session = nbp.Session(cluster=cluster)
    pending = session.submit("import time; time.sleep(30)")
    session.stop()
    with pytest.raises(nbp.ClosedError):
        pending.result(20)
    assert all(node.ended for node in cluster.nodes.values())
    with pytest.raises(nbp.ClosedError):
        session.run("1")


def test_a_host_that_cannot_start_its_ranks(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it; no other host keeps ranks."""

    def refuse(node: Node, *_: Any) -> bytes:
        if node.port.host == "b":
            raise MemoryError("no room")
        return pickle.dumps(None)

    replace_call(monkeypatch, "start", refuse)
    session = nbp.Session(cluster=cluster)
    with pytest.raises(nbp.StartError, match="host b: MemoryError: no room"):
        session.start()
    assert all(each.ended for each in cluster.nodes.values())
    session.stop()


def test_more_ranks_than_a_host_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before they start."""
    monkeypatch.setattr(launch, "MOST_RANKS", 1)
    refused = pytest.raises(StartError, match="ValueError: 2 ranks do not fit this machine")
    with refused, nbp.Session(cluster=Loopback(["a", "b"], cpus=2)):
        pass


def test_a_supervisor_that_dies_where_others_go_on(cluster: Loopback) -> None:
    """The cell ends: its host, whose ranks have failed, has no more messages for the others."""
    with nbp.Session(cluster=cluster) as session:
        session.run("pass")
        pid = session.run("import os; os.getppid()", ranks=[1]).values[1]
        pending = session.submit("import time; print(1); time.sleep(10 * rank)", on_error="continue")
        wait_until(lambda: pending.stdout(1), pending)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ParallelError, match="supervisor"):
            pending.result(20)


@pytest.mark.parametrize("what", ["system", "Python", "nbparallel", "numpy"])
def test_other_versions_are_refused(cluster: Loopback, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The host and what differs, and nothing else, are named."""

    def hello(node: Node, handle: Callable[..., bytes], op: str, data: bytes) -> bytes:
        mine = handle(node, op, data)
        return pickle.dumps({**pickle.loads(mine), what: "other"}) if node.port.host == "b" else mine

    replace_call(monkeypatch, "hello", hello)
    session = nbp.Session(cluster=cluster)
    with pytest.raises(nbp.StartError, match=rf"^host b has {what} other \(here [^,]*\): use the same"):
        session.start()
    session.stop()


def test_damaged_events_are_the_loss_of_their_host(cluster: Loopback) -> None:
    """What cannot be read ends the host's part; nothing waits for it, and it ends."""
    with nbp.Session(cluster=cluster) as session:
        pending = session.submit("import time; time.sleep(0.5 + 30 * rank)")
        node = cluster.nodes["b"]
        node.emit(b"\0no pickle")
        with pytest.raises(ParallelError, match=r"host b is lost.*its node sent what cannot be read"):
            pending.result(20)
        assert node.ended


def test_a_start_that_takes_too_long(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what it waits for; no host keeps ranks."""
    from nbparallel.cluster import host_pool

    ended = threading.Event()
    monkeypatch.setattr(host_pool, "MOST_SECONDS", 0.3)
    replace_call(monkeypatch, "start", lambda *_: pickle.dumps(ended.wait(20)))
    session = nbp.Session(cluster=cluster)
    try:
        with pytest.raises(nbp.StartError, match=r"no answer for 0\.3 s: hosts a, b"):
            session.start()
    finally:
        ended.set()
    assert all(each.ended for each in cluster.nodes.values())
    session.stop()


def test_a_start_can_be_interrupted(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes; no host keeps ranks, and the next use starts them."""
    begun = threading.Event()

    def slow(node: Node, handle: Callable[..., bytes], op: str, data: bytes) -> bytes:
        begun.set()
        time.sleep(1.0)
        return handle(node, op, data)

    session = nbp.Session(cluster=cluster)
    timer = threading.Thread(target=lambda: begun.wait(20) and os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with monkeypatch.context() as patch:
        replace_call(patch, "start", slow)
        with pytest.raises(KeyboardInterrupt):
            session.start()
    timer.join()
    assert all(each.ended for each in cluster.nodes.values())
    assert session.run("rank").values == [0, 1]
    session.stop()
