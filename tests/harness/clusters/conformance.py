"""Conformance suite of what carries a session over hosts: ours, and those that others write.

Derive a class whose name begins with ``Test``, with two hosts, and a way to lose one::

    class TestMine(ClusterTests):
        @pytest.fixture
        def cluster(self):
            with closing(MyCluster(...)) as cluster:
                yield cluster

        def lose(self, cluster, host): ...
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from nbparallel.cluster.contract import MOST_EVENT, MOST_PIECE, Anchor, Cluster, NodePort
from nbparallel.errors import ChannelClosedError, StartError
from nbparallel.testing.processes import read
from nbparallel.testing.waiting import wait_until

if TYPE_CHECKING:
    from nbparallel.session import Session

ECHO = "tests.harness.clusters.conformance:EchoNode"
BROKEN = "tests.harness.clusters.conformance:broken_node"
PATIENCE = 20.0
"""Seconds for an answer that is expected."""


def session_messages(session: Session) -> SimpleQueue[Any]:
    """Return what the hosts of a started session have sent, and it has not yet handled."""
    messages: SimpleQueue[Any] = session._ranks.messages  # type: ignore[attr-defined]  # of its hosts
    return messages


class EchoNode:
    """A node for tests; its calls are its methods."""

    def __init__(self, port: NodePort) -> None:
        self._port, self._may_go = port, threading.Event()

    def handle(self, op: str, data: bytes) -> bytes:
        # docstring inherited
        found: bytes = getattr(self, f"_{op}")(data)
        return found

    def end(self) -> None:
        # docstring inherited
        self._may_go.set()

    def _echo(self, data: bytes) -> bytes:
        return self._port.host.encode() + b":" + data

    def _pid(self, _data: bytes) -> bytes:
        return str(os.getpid()).encode()

    def _wait(self, _data: bytes) -> bytes:
        return str(self._may_go.wait(PATIENCE)).encode()

    def _go(self, _data: bytes) -> bytes:
        self._may_go.set()
        return b""

    def _fail(self, data: bytes) -> bytes:
        raise ValueError(data.decode())

    def _emit(self, data: bytes) -> bytes:
        first, count, size = map(int, data.split())
        for number in range(first, first + count):
            self._port.emit(str(number).encode().ljust(size))
        return b""

    def _send(self, data: bytes) -> bytes:
        peer, count, size = data.decode().split()
        link = self._port.link(peer)
        for number in range(int(count)):
            link.send(str(number).encode(), memoryview(bytes([number % 251])), b"", bytes(int(size)))
        return b""

    def _receive(self, data: bytes) -> bytes:
        peer, count, size = data.decode().split()
        link = self._port.link(peer)
        for number in range(int(count)):
            wanted = str(number).encode(), bytes([number % 251]), b"", bytes(int(size))
            if (frame := link.receive(PATIENCE)) != wanted:
                return repr([part[:20] for part in frame]).encode()
        return b"all"

    def _receive_end(self, data: bytes) -> bytes:
        """Return how many frames come before the link is closed."""
        count = 0
        try:
            while True:
                self._port.link(data.decode()).receive(PATIENCE)
                count += 1
        except ChannelClosedError:
            return str(count).encode()

    def _nothing_comes(self, data: bytes) -> bytes:
        with pytest.raises(TimeoutError):
            self._port.link(data.decode()).receive(0.05)
        return b"nothing"

    def _close(self, data: bytes) -> bytes:
        self._port.link(data.decode()).close()
        return b""


def broken_node(_port: NodePort) -> EchoNode:
    """Raise what a node raises that cannot start."""
    raise RuntimeError("no room in here")


class Recorder:
    """Keeps what a cluster passes on."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bytes]] = []
        self.losses: list[tuple[str, str]] = []

    def event(self, host: str, data: bytes) -> None:
        # docstring inherited
        self.events.append((host, data))

    def lost(self, host: str, reason: str) -> None:
        # docstring inherited
        self.losses.append((host, reason))

    def of(self, host: str) -> list[bytes]:
        """Return the events of a host, without the blanks that fill them."""
        return [data.rstrip() for name, data in self.events if name == host]


class ClusterTests:
    """What every adapter promises; `cluster` is a fixture with at least two hosts."""

    def lose(self, cluster: Cluster, host: str) -> None:
        """Have a host disappear."""
        raise NotImplementedError

    @pytest.fixture
    def recorder(self) -> Recorder:
        """Return what keeps the events."""
        return Recorder()

    @pytest.fixture
    def anchors(self, cluster: Cluster, recorder: Recorder) -> Iterator[dict[str, Anchor]]:
        """Start a node on the first two hosts."""
        cluster.events(recorder)
        yield {host.name: cluster.anchor(host.name, ECHO) for host in cluster.hosts()[:2]}
        cluster.close()

    @pytest.fixture
    def pair(self, anchors: dict[str, Anchor]) -> tuple[str, str]:
        """Return the names of two hosts with nodes."""
        one, other = anchors
        return one, other

    def test_hosts_are_in_order_of_their_names(self, cluster: Cluster) -> None:
        """Ranks are numbered in this order: it is the same whenever it is asked for."""
        hosts = cluster.hosts()
        names = [host.name for host in hosts]
        assert len(names) >= 2
        assert names == sorted(set(names))
        assert all(host.cpus >= 1 for host in hosts)
        assert cluster.hosts() == hosts

    def test_calls_reach_their_hosts(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """Each host handles its own data, and replies with its own."""
        one, other = pair
        replies = cluster.call("echo", {one: b"\0\xff", other: b""}, PATIENCE)
        assert {host: reply.data for host, reply in replies.items()} == {
            one: one.encode() + b":\0\xff", other: other.encode() + b":"
        }  # fmt: skip
        assert not any(reply.error or reply.silent for reply in replies.values())

    def test_a_large_call_arrives_whole(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """The largest piece goes there and comes back."""
        data = os.urandom(MOST_PIECE)
        reply = cluster.call("echo", {pair[0]: data}, PATIENCE)[pair[0]]
        assert reply.data == pair[0].encode() + b":" + data

    def test_what_a_node_raises_is_a_reply(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """Its type and text are there, and the other host's reply too."""
        one, other = pair
        replies = cluster.call("fail", {one: "tölpel".encode()}, PATIENCE)
        assert "ValueError" in replies[one].error
        assert "tölpel" in replies[one].error
        assert cluster.call("echo", {other: b"x"}, PATIENCE)[other].data

    def test_no_call_waits_for_another_one(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """A call that waits is silent in time; what comes after it is handled, and ends its wait."""
        one, _ = pair
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(cluster.call, "wait", {one: b""}, PATIENCE)
            assert cluster.call("wait", {one: b""}, 0.05)[one].silent
            assert cluster.call("go", {one: b""}, 0.0)[one].silent
            assert waiting.result(PATIENCE)[one].data == b"True"

    def test_a_silent_host_delays_no_other(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """The replies of the hosts that answer are there when the time is over."""
        one, other = pair
        cluster.call("go", {other: b""}, PATIENCE)
        replies = cluster.call("wait", {one: b"", other: b""}, 1.0)
        assert replies[one].silent
        assert replies[other].data == b"True"

    def test_events_come_in_order(self, cluster: Cluster, pair: tuple[str, str], recorder: Recorder) -> None:
        """Of each host, none is missing, of any size up to the most."""
        one, other = pair
        cluster.call("emit", {one: b"0 300 10", other: b"7 20 %d" % MOST_EVENT}, PATIENCE)
        cluster.call("emit", {one: b"300 100 1000"}, PATIENCE)
        wait_until(lambda: len(recorder.of(one)) == 400 and len(recorder.of(other)) == 20)
        assert recorder.of(one) == [b"%d" % number for number in range(400)]
        assert recorder.of(other) == [b"%d" % number for number in range(7, 27)]

    def test_an_event_that_is_too_large_is_refused(
        self, cluster: Cluster, pair: tuple[str, str], recorder: Recorder
    ) -> None:
        """Nothing of it is sent."""
        reply = cluster.call("emit", {pair[0]: b"0 1 %d" % (MOST_EVENT + 1)}, PATIENCE)[pair[0]]
        assert str(MOST_EVENT) in reply.error
        assert recorder.events == []

    def test_a_node_that_cannot_start(self, cluster: Cluster, recorder: Recorder) -> None:
        """The error names the host and has the reason; the host can be used afterwards."""
        cluster.events(recorder)
        host = cluster.hosts()[0].name
        with pytest.raises(StartError, match=f"host {host}.*no room in here|(?s:{host}.*no room in here)"):
            cluster.anchor(host, BROKEN)
        cluster.anchor(host, ECHO)
        assert cluster.call("echo", {host: b"x"}, PATIENCE)[host].data
        cluster.close()
        assert recorder.losses == []

    def test_releasing_an_anchor_ends_the_node(
        self, cluster: Cluster, pair: tuple[str, str], anchors: dict[str, Anchor], recorder: Recorder
    ) -> None:
        """That is no loss; calls to it are refused, and the other node lives."""
        one, other = pair
        pid = int(cluster.call("pid", {one: b""}, PATIENCE)[one].data)
        anchors[one].release()
        anchors[one].release()
        wait_until(lambda: cluster.call("echo", {one: b"x"}, PATIENCE)[one].error)
        assert pid == os.getpid() or wait_until(lambda: read(pid) is None)
        assert cluster.call("echo", {other: b"x"}, PATIENCE)[other].data
        assert recorder.losses == []

    def test_a_released_host_can_be_used_again(
        self, cluster: Cluster, pair: tuple[str, str], anchors: dict[str, Anchor]
    ) -> None:
        """A new anchor is a new node."""
        one, _ = pair
        anchors[one].release()
        cluster.anchor(one, ECHO)
        assert cluster.call("echo", {one: b"x"}, PATIENCE)[one].data == one.encode() + b":x"

    def test_a_lost_host_is_reported_once(
        self, cluster: Cluster, pair: tuple[str, str], recorder: Recorder
    ) -> None:
        """Calls to it end, also those that wait; the others go on, and it is not listed any more."""
        one, other = pair
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(cluster.call, "wait", {one: b""}, PATIENCE)
            cluster.call("echo", {one: b""}, PATIENCE)
            self.lose(cluster, one)
            began = time.monotonic()
            wait_until(lambda: recorder.losses)
            assert time.monotonic() - began < PATIENCE / 2
            assert waiting.result(PATIENCE)[one].error or waiting.result()[one].data
        assert cluster.call("echo", {one: b""}, PATIENCE)[one].error
        assert cluster.call("echo", {other: b"x"}, PATIENCE)[other].data
        assert [host for host, _ in recorder.losses] == [one]
        assert recorder.losses[0][1]
        wait_until(lambda: one not in [host.name for host in cluster.hosts()])

    def test_frames_of_a_link_come_in_order(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """Both ways at the same time, in buffers of any size, as they were sent."""
        one, other = pair
        cluster.link(one, other, PATIENCE)
        with ThreadPoolExecutor(3) as pool:
            jobs = [
                pool.submit(cluster.call, "send", {one: f"{other} 50 100000".encode()}, PATIENCE),
                pool.submit(cluster.call, "send", {other: f"{one} 9 3000000".encode()}, PATIENCE),
                pool.submit(cluster.call, "receive", {one: f"{other} 9 3000000".encode()}, PATIENCE),
            ]
            found = cluster.call("receive", {other: f"{one} 50 100000".encode()}, PATIENCE)
            assert found[other].data == b"all", found
            assert jobs[2].result(PATIENCE)[one].data == b"all"
            assert not any(reply.error for job in jobs for reply in job.result(PATIENCE).values())
        assert cluster.call("nothing_comes", {one: other.encode()}, PATIENCE)[one].data == b"nothing"

    def test_a_link_ends_with_either_node(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """What was sent before arrives; then both ends raise."""
        one, other = pair
        cluster.link(one, other, PATIENCE)
        assert not cluster.call("send", {one: f"{other} 3 100000".encode()}, PATIENCE)[one].error
        assert cluster.call("receive", {other: f"{one} 3 100000".encode()}, PATIENCE)[other].data == b"all"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(cluster.call, "receive_end", {other: one.encode()}, PATIENCE)
            self.lose(cluster, one)
            assert waiting.result(PATIENCE)[other].data == b"0"
        reply = cluster.call("send", {other: f"{one} 1 10".encode()}, PATIENCE)[other]
        assert "ChannelClosedError" in reply.error

    def test_a_closed_link_says_so_at_both_ends(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """Frames on their way arrive first."""
        one, other = pair
        cluster.link(one, other, PATIENCE)
        assert not cluster.call("send", {one: f"{other} 5 10".encode()}, PATIENCE)[one].error
        assert not cluster.call("close", {one: other.encode()}, PATIENCE)[one].error
        assert cluster.call("receive_end", {other: one.encode()}, PATIENCE)[other].data == b"5"

    def test_a_link_needs_two_nodes(self, cluster: Cluster, pair: tuple[str, str]) -> None:
        """The error about hosts that cannot reach each other names both."""
        one, other = pair
        self.lose(cluster, other)
        with pytest.raises(StartError) as caught:
            cluster.link(one, other, 5.0)
        assert one in str(caught.value)
        assert other in str(caught.value)

    def test_closing_ends_every_node(
        self, cluster: Cluster, pair: tuple[str, str], recorder: Recorder
    ) -> None:
        """Nothing of the session is left, and nothing is called lost."""
        pids = [int(reply.data) for reply in cluster.call("pid", dict.fromkeys(pair, b""), PATIENCE).values()]
        cluster.close()
        cluster.close()
        wait_until(lambda: all(pid == os.getpid() or read(pid) is None for pid in pids))
        assert recorder.losses == []
