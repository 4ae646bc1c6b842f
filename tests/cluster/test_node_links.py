"""Doors and links: streams between leaders, frames that come too early or too late, links that close."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from nbparallel.cluster.contract import Link
from nbparallel.cluster.node import LINKED, NodeDoor, NodeLinks
from nbparallel.cluster.node_process import ProcessPort, pack_head
from nbparallel.distributed.runtime.host_door import CHUNK, WINDOW, HostDoor
from nbparallel.errors import ChannelClosedError
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.frames import DoorKind
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.system import roomy_pair
from tests.harness.clusters.loopback import LoopbackLink

HOSTS = ("a", "b", "c")


class NodeInTest:
    """A node's links, and its leader's end of a task's door; the port of the node, too."""

    def __init__(self, host: str) -> None:
        self.host, self.index = host, HOSTS.index(host)
        self.ends: dict[str, Link] = {}
        self.closed: list[tuple[str, int]] = []
        self.links = NodeLinks(self, lambda *link: self.closed.append(link))
        self._doors: list[tuple[NodeDoor, HostDoor]] = []

    def link(self, peer: str) -> Link:
        """Return this host's end of a link."""
        return self.ends[peer]

    def emit(self, data: bytes) -> None:
        """Refuse: links emit nothing."""
        raise AssertionError(data)

    def begin(self, task: int) -> HostDoor:
        """Begin a task; return the leader's end."""
        door = self.links.open(task, HOSTS, self.index)
        leader = HostDoor(door.fds[0], WorldPlace(HOSTS, (0, 1, 2, 3), self.index))
        self._doors.append((door, leader))
        return leader

    def end(self, *, well: bool = True) -> None:
        """End the task, as its rank does and then its node."""
        self._doors.pop()[1].close()
        self.links.end_task(well=well)

    def close(self) -> None:
        """Release everything."""
        while self._doors:
            self.end()
        self.links.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture
def nodes() -> Any:
    """Return three nodes, each linked with the others."""
    made = [NodeInTest(host) for host in HOSTS]
    for one in made:
        for other in made[: one.index]:
            one.ends[other.host], other.ends[one.host] = LoopbackLink.pair(one.host, other.host)
    yield made
    for node in made:
        node.close()
    names = {f"nbparallel-link-{host}" for host in HOSTS}
    wait_until(lambda: not [t for t in threading.enumerate() if t.name in names or "-door-" in t.name])


def never(missing: list[int]) -> None:
    """Check nothing."""


def raising(leader: HostDoor) -> Callable[[list[int]], None]:
    """Return a check that raises what became of a host that is missing."""

    def check(missing: list[int]) -> None:
        for host in missing:
            if host in leader.ended:
                raise LookupError(f"{HOSTS[host]} {leader.ended[host].name}")

    return check


def test_streams_of_every_length(nodes: Sequence[NodeInTest]) -> None:
    """Nothing, little, one more than a frame, more than a window; other lengths in the other direction."""
    sizes = [0, 1, CHUNK - 1, CHUNK + 1, (WINDOW + 3) * CHUNK]

    def lead(node: NodeInTest) -> None:
        leader = node.begin(1)
        for step, size in enumerate(sizes):
            mine = size if node.index == step % 3 else 3
            text = f"{node.index}".encode()
            out = {host: [b"", text + f"{host}".encode(), memoryview(text * mine)] for host in range(3)}
            for host, (nothing, who, much) in leader.exchange(out, never).items():
                assert (bytes(nothing), bytes(who)) == (b"", f"{host}{node.index}".encode())
                assert bytes(much) == f"{host}".encode() * (size if host == step % 3 else 3)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lead, nodes, timeout=30))


def test_frames_that_come_before_the_task(nodes: Sequence[NodeInTest]) -> None:
    """They wait until it begins; those of an ended one are dropped."""
    first = nodes[0].begin(1)
    out = {host: [b"late"] for host in (1, 2)}
    looks: list[list[int]] = []

    def give_up(missing: list[int]) -> None:
        looks.append(missing)
        if len(looks) == 3:  # the frames have left by then
            raise TimeoutError

    with pytest.raises(TimeoutError):
        first.exchange(out, give_up)
    nodes[0].end(well=False)
    with ThreadPoolExecutor(3) as pool:
        early = pool.submit(nodes[0].begin(2).exchange, {host: [b"new"] for host in (1, 2)}, never)
        rest = [pool.submit(node.begin(2).exchange, {}, never) for node in nodes[1:]]
        assert [bytes(future.result(20)[0][0]) for future in rest] == [b"new", b"new"]
        early.result(20)


@pytest.mark.parametrize("well", [True, False])
def test_the_end_of_a_host(nodes: Sequence[NodeInTest], well: bool) -> None:
    """It is known behind everything that was sent before, however much that is."""
    leaders = [node.begin(1) for node in nodes]
    big = bytes(3 * CHUNK)
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(leader.exchange, {host: [big] for host in range(3)}, raising(leader))
            for leader in leaders
        ]
        assert all(len(part[0]) == len(big) for future in futures for part in future.result(20).values())
        nodes[2].end(well=well)
        again = [pool.submit(leader.exchange, {}, raising(leader)) for leader in leaders[:2]]
        for future in again:
            with pytest.raises(LookupError, match="c ENDED" if well else "c FAILED"):
                future.result(20)


def test_a_link_that_is_closed(nodes: Sequence[NodeInTest]) -> None:
    """Leaders on both sides learn it, in this task and in later ones, until there is another link."""
    leader = nodes[0].begin(1)
    nodes[0].ends["b"].close()
    with pytest.raises(LookupError, match="b CLOSED"):
        leader.exchange({1: [b"x"]}, raising(leader))
    wait_until(lambda: nodes[0].closed == [("b", 1)])
    nodes[0].end()
    leader = nodes[0].begin(2)
    with pytest.raises(LookupError, match="b CLOSED"):
        leader.exchange({1: [b"x"]}, raising(leader))
    assert nodes[0].closed == [("b", 1), ("b", 2)]  # the kernel did not know
    nodes[0].end()
    nodes[0].ends["b"], nodes[1].ends["a"] = LoopbackLink.pair("a", "b")
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(node.begin(3).exchange, {1: [b"y"]}, never) for node in nodes]
        assert bytes(found[1].result(20)[0][0]) == b"y"
        assert not found[0].result(20)[1]


def test_a_link_that_is_replaced() -> None:
    """What reads the former one learns that it is closed, though only the other host has noticed its end."""
    parent, child = roomy_pair()
    port = ProcessPort(child, "a")
    serving = threading.Thread(target=port.serve, args=(None,))
    serving.start()
    with parent, child:
        for number in (1, 2):
            former = port.link("b") if number == 2 else None
            parent.sendall(pack_head(0, "linked", name="b", number=number))
            assert parent.recv(1 << 10) == pack_head(0, "reply", number=number)
        assert former is not None
        with pytest.raises(ChannelClosedError, match="the link with host b is closed"):
            former.receive(20)
        with pytest.raises(TimeoutError):
            port.link("b").receive(0.01)
        parent.shutdown(socket.SHUT_RDWR)
        serving.join(20)
    assert not serving.is_alive()


def test_no_more_is_under_way_than_a_window(nodes: Sequence[NodeInTest]) -> None:
    """However much there is for a host that takes nothing."""
    leader, looks = nodes[0].begin(1), Event()

    def check(missing: list[int]) -> None:
        if looks.wait(0.02):
            raise TimeoutError

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(leader.exchange, {1: [bytes(3 * WINDOW * CHUNK)]}, check)
        end = nodes[1].ends["a"]
        try:
            sizes = [len(end.receive(20)[1]) for _ in range(WINDOW)]
            with pytest.raises(TimeoutError):
                end.receive(0.3)
        finally:
            looks.set()
        with pytest.raises(TimeoutError):
            sending.result(20)
    assert sizes == [CHUNK] * WINDOW


def test_damaged_frames_are_no_data(nodes: Sequence[NodeInTest]) -> None:
    """A frame of an exchange that this leader is not in ends its operation; it is not taken for another."""
    leader = nodes[0].begin(1)
    nodes[1].begin(1)
    nodes[1].ends["a"].send(LINKED.pack(1, DoorKind.DATA, 7), b"")
    with pytest.raises(Exception, match="frame of exchange 7 came in exchange 1"):
        leader.exchange({}, never)


@pytest.mark.parametrize(
    "frame", [[b"x"], [b"", b""], [LINKED.pack(1, 1, 1)], [LINKED.pack(1, 1, 1), b"", b""]]
)
def test_damaged_frames_end_the_link(nodes: Sequence[NodeInTest], frame: list[bytes]) -> None:
    """Both hosts learn it, and no leader waits for what is behind them."""
    leaders = [node.begin(1) for node in nodes[:2]]
    nodes[1].ends["a"].send(*frame)
    wait_until(lambda: (nodes[0].closed, nodes[1].closed) == ([("b", 1)], [("a", 1)]))
    for at, leader in enumerate(leaders):
        with pytest.raises(LookupError, match=f"{'ba'[at]} CLOSED"):
            leader.exchange({1 - at: [b"x"]}, raising(leader))
