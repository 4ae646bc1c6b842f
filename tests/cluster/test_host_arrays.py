"""Arrays of the notebook on hosts: once to each, in shared memory there, again when something says so."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.cluster import host_dispatch
from nbparallel.cluster.host_messages import NodeReply
from nbparallel.cluster.node import NodeArrays
from nbparallel.errors import HostLostError, SharedMemoryFullError, UnknownNameError
from nbparallel.sharing import current_store
from nbparallel.testing.waiting import wait_until
from tests.harness.clusters import Loopback

pytestmark = [
    pytest.mark.time_limit(60),
    pytest.mark.may_leave("descriptor", "mapping", reason="the nodes are here, and their ranks hold arrays"),
]


class CountingLoopback(Loopback):
    """A cluster that counts what is sent of arrays."""

    def __init__(self, names: list[str], cpus: int = 2) -> None:
        super().__init__(names, cpus)
        self.filled: list[str] = []
        """The host of each piece."""

    def call(self, op: str, data: Mapping[str, bytes], timeout: float) -> dict[str, NodeReply]:
        """Call, and count."""
        if op == "fill":
            self.filled += data
        return super().call(op, data, timeout)

    def take(self) -> str:
        """Return to which hosts something was sent since the last time."""
        filled, self.filled = sorted(set(self.filled)), []
        return "".join(filled)


@pytest.fixture(scope="module")
def cluster() -> CountingLoopback:
    """Return two hosts with two ranks each."""
    return CountingLoopback(["a", "b"])


@pytest.fixture(scope="module")
def hosts(cluster: CountingLoopback) -> Iterator[nbp.Session]:
    """Return a session on them."""
    with nbp.Session(cluster=cluster) as session:
        session.run("pass")
        yield session


def test_an_array_is_sent_once(hosts: nbp.Session, cluster: CountingLoopback) -> None:
    """Not again when it was written into, but when it is pushed, or its name is bound to another one."""
    names: dict[str, Any] = {"x": np.arange(10.0), "y": np.arange(3)}
    cluster.take()
    assert hosts.run("float(x.sum())", namespace=names).values == [45.0] * 4
    assert cluster.take() == "ab"
    names["x"][0] = 100.0
    assert hosts.run("float(x.sum()), int(y.sum())", namespace=names).values == [(45.0, 3)] * 4
    assert len(cluster.filled) == 2  # of y
    assert hosts.run("float(x.sum())", namespace=names).notes == ()
    hosts.push_names("x", names)
    assert hosts.run("float(x.sum())", namespace=names).values == [145.0] * 4
    cluster.take()
    names["x"] = np.ones(4)
    assert hosts.run("float(x.sum())", namespace=names).values == [4.0] * 4
    assert cluster.take() == "ab"
    names["z"] = names["x"]  # the same object
    assert hosts.run("float(z.sum())", namespace=names).values == [4.0] * 4
    assert cluster.take() == ""
    with pytest.raises(UnknownNameError, match="no variable 'zz'"):
        hosts.push_names(["zz"], names)


def test_ranks_of_a_host_have_the_same_memory(hosts: nbp.Session) -> None:
    """They may only read it; what a rank assigns is replaced when the notebook's name is bound anew."""
    names: dict[str, Any] = {"x": np.arange(8.0)}
    assert hosts.run("nbp.is_shared(x), x.flags.writeable", namespace=names).values == [(True, False)] * 4
    with pytest.raises(nbp.ParallelError, match="read-only"):
        hosts.run("x[0] = 1", namespace=names)
    hosts.run("if rank == 2: x = rank", namespace=names)
    assert hosts.run("type(x).__name__", namespace=names).values == ["ndarray", "ndarray", "int", "ndarray"]
    names["x"] = np.zeros(2)
    assert hosts.run("x.shape", namespace=names).values == [(2,)] * 4


_FORMS: dict[str, Any] = {
    "C": np.arange(24).reshape(2, 3, 4),
    "F": np.asfortranarray(np.arange(24.0).reshape(4, 6)),
    "strided": np.arange(100)[::-3],
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
    "scalar": np.array(5),
    "empty": np.empty((0, 3)),
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "structured": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "dates": np.array(["2020-01-01", "2021-05-06"], dtype="M8[D]"),
    "text": np.array(["some", "ümläut"]),
    "bool": np.array([True, False]),
    "big-endian": np.arange(4, dtype=">i8"),
    "pieces": np.arange(400_000.0),
}


@pytest.mark.parametrize("form", _FORMS)
def test_every_form_arrives(hosts: nbp.Session, form: str) -> None:
    """Same values, type and shape."""
    x = _FORMS[form]
    for value in hosts.run("x", namespace={"x": x}).values:
        assert value.dtype == x.dtype
        assert value.shape == x.shape
        assert np.array_equal(value, x)


def _count(nbytes: int) -> int:
    """Return how many segments of about this size the nodes have, which are in this process."""
    store = current_store()
    store.drain()
    return sum(
        segment.phase != "pooled" and nbytes <= segment.nbytes < nbytes + 65536
        for segment in store.segments()
    )


def test_what_no_rank_of_a_host_holds_is_freed(hosts: nbp.Session, cluster: CountingLoopback) -> None:
    """One that a rank still has is there for the others without being sent."""
    names = {"x": np.arange(500_000.0)}
    hosts.run("float(x[0])", namespace=names)
    cluster.take()
    for ranks, sent in (([0], ""), ([0, 1], "a"), ([2, 3], "b"), ([0, 1, 2, 3], "ab")):
        hosts.run("del x", ranks=ranks, namespace=names)
        wait_until(lambda sent=sent: _count(names["x"].nbytes) == 2 - len(sent))  # type: ignore[misc]
        assert hosts.run("float(x[-1])", namespace=names).values == [499_999.0] * 4
        assert cluster.take() == sent


def test_a_rank_that_died_is_given_it_again(hosts: nbp.Session, cluster: CountingLoopback) -> None:
    """From the memory of its host."""
    names = {"x": np.arange(1000.0)}
    hosts.run("x", namespace=names)
    cluster.take()
    with pytest.raises(nbp.ParallelError, match="RankDiedError"):
        hosts.run("import os\nif rank == 3: os.kill(os.getpid(), 9)")
    assert hosts.run("float(x.sum())", namespace=names).values == [499_500.0] * 4
    assert cluster.take() == ""


def test_a_line_says_what_was_sent(hosts: nbp.Session) -> None:
    """Bytes and seconds; the first one what is not seen; little is not mentioned."""
    names = {"x": np.zeros(1 << 20, "u1"), "y": np.zeros(3)}
    (line,) = hosts.run("x, y", namespace=names, want_values=False, show_values=False).notes
    assert line.startswith("sent to 2 hosts in ")
    assert " s: x (1.0 MiB), y (24 B)" in line
    assert hosts.run("z", namespace={"z": np.zeros(3)}).notes == ()


def test_the_first_line_says_what_is_not_seen() -> None:
    """However little is sent."""
    with nbp.Session(cluster=Loopback(["a"], 1)) as session:
        names = {"x": np.zeros(3), "y": np.zeros(2)}
        (line,) = session.run("x", namespace=names).notes
        assert line.startswith("sent to host a in ")
        assert "what is written into an array here is not seen there" in line
        assert "Session.push_names" in line
        assert session.run("y", namespace=names).notes == ()


def test_an_interrupt_while_it_is_sent(
    hosts: nbp.Session, cluster: CountingLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs; the next cell sends all of it, and finds no half."""
    names = {"x": np.arange(1_000_000.0)}
    begun, fill = threading.Event(), NodeArrays.fill

    def slow(self: NodeArrays, number: int, start: int, piece: bytes) -> None:
        begun.set()
        if start >= 3 << 20:
            threading.Event().wait(0.5)
        fill(self, number, start, piece)

    monkeypatch.setattr(NodeArrays, "fill", slow)
    sender = threading.Thread(target=lambda: begun.wait(20) and os.kill(os.getpid(), signal.SIGINT))
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        hosts.run("ran = float(x.sum())", namespace=names)
    sender.join()
    monkeypatch.setattr(NodeArrays, "fill", fill)
    assert (
        hosts.run("'ran' in globals(), float(x.sum())", namespace=names).values
        == [(False, 499_999_500_000.0)] * 4
    )


def test_a_host_without_memory_for_it(hosts: nbp.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it, and nothing runs; the session goes on."""

    def refuse(*_: Any) -> Any:
        raise SharedMemoryFullError("no room")

    monkeypatch.setattr(NodeArrays, "lack", refuse)
    with pytest.raises(nbp.NbParallelError, match="host a: SharedMemoryFullError: no room"):
        hosts.run("ran = x", namespace={"x": np.zeros(3)})
    monkeypatch.undo()
    assert hosts.run("'ran' in globals()").values == [False] * 4


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["host", "node"])
def test_a_host_that_is_lost_while_it_is_sent(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with its ranks; the others go on.  If only its node ended, it is used again."""
    cluster = CountingLoopback(["a", "b"], 1)
    fill = NodeArrays.fill

    def lose(self: NodeArrays, *piece: Any) -> None:
        monkeypatch.setattr(NodeArrays, "fill", fill)
        if whole:
            cluster.lose("b")
        else:
            cluster.nodes["b"].release()
        fill(self, *piece)

    with nbp.Session(cluster=cluster) as session:
        session.run("kept = rank")
        monkeypatch.setattr(NodeArrays, "fill", lose)
        with pytest.raises(HostLostError, match=r"host b is lost, and rank 1 .* with it: the host is lost"):
            session.run("x", namespace={"x": np.zeros(10 * host_dispatch.PIECE_NBYTES, "u1")})
        assert session.run("kept", ranks=[0]).values[0] == 0
        if not whole:
            assert session.run("'kept' in globals(), all_reduce(rank)").values == [(True, 1), (False, 1)]


def test_what_is_to_be_written_is_refused_before_anything_is_sent(
    hosts: nbp.Session, cluster: CountingLoopback
) -> None:
    """Also in a name that a function of the notebook uses."""
    names: dict[str, Any] = {"y": nbp.zeros(3), "x": np.zeros(3)}
    exec("def f():\n    return y", names)
    cluster.take()
    with pytest.raises(nbp.HostBoundaryError, match=r"y_here = y\.copy"):
        hosts.run("x, f()", namespace=names)
    assert cluster.take() == ""
