"""Doors and links: streams between leaders, frames that come too early or too late, links that close."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from nbparallel.cluster.host_door import CHUNK, HostDoor, HostPlace
from nbparallel.cluster.host_links import HostLinks
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.frames import DOOR_HEAD, DoorKind
from nbparallel.wire.system import roomy_pair
from tests.harness.clusters.loopback import LoopbackConnection, in_loop

HOSTS = ("a", "b", "c")


class HostInTest:
    """A host's links, and its leader's end of a task's door."""

    def __init__(self, host: str, loop: asyncio.AbstractEventLoop) -> None:
        self.host, self.index, self._loop = host, HOSTS.index(host), loop
        self.lost: list[tuple[str, int]] = []
        self.links: HostLinks = in_loop(
            loop, lambda: HostLinks(host, bytes, lambda *link: self.lost.append(link))
        )
        self._open: list[tuple[socket.socket, HostDoor]] = []

    def begin(self, task: int) -> HostDoor:
        """Begin a task; return the leader's end."""
        mine, theirs = roomy_pair()
        leader = HostDoor(mine.fileno(), HostPlace(3, HOSTS, (0, 1, 2, 3), self.index))
        self._open.append((mine, leader))
        in_loop(self._loop, lambda: self.links.begin(task, HOSTS, theirs))
        return leader

    def end(self, *, well: bool = True) -> None:
        """End the task, as its rank does and then its node."""
        mine, leader = self._open.pop()
        leader.close()
        if well:
            mine.send(DOOR_HEAD.pack(0, DoorKind.ENDED, 0, 0))
        else:
            mine.shutdown(socket.SHUT_RDWR)
        mine.close()

    def close(self) -> None:
        """Release everything."""
        while self._open:
            self.end(well=False)
        in_loop(self._loop, self.links.end)


def connect(loop: asyncio.AbstractEventLoop, one: HostInTest, other: HostInTest) -> LoopbackConnection:
    """Connect two hosts; return the end of the first."""

    def begin() -> LoopbackConnection:
        ends = LoopbackConnection.pair()
        for here, there, end in zip((one, other), (other, one), ends, strict=True):
            here.links.connect(there.host, end)
            here.links.run(here.links.read(there.host, end))
        return ends[0]

    found: LoopbackConnection = in_loop(loop, begin)
    return found


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return a loop that runs in a thread."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(20)
    made.close()


@pytest.fixture
def hosts(loop: asyncio.AbstractEventLoop) -> Iterator[Sequence[HostInTest]]:
    """Return three hosts, each linked with the others."""
    made = [HostInTest(host, loop) for host in HOSTS]
    for one in made:
        for other in made[: one.index]:
            connect(loop, one, other)
    yield made
    for host in made:
        host.close()
    wait_until(lambda: in_loop(loop, lambda: len(asyncio.all_tasks()) == 1))


def never(missing: list[int]) -> None:
    """Check nothing."""


def raising(leader: HostDoor) -> Callable[[list[int]], None]:
    """Return a check that raises what became of a host that is missing."""

    def check(missing: list[int]) -> None:
        for host in missing:
            if host in leader.ended:
                raise LookupError(f"{HOSTS[host]} {leader.ended[host].name}")

    return check


def giving_up(looks: int) -> Callable[[list[int]], None]:
    """Return a check that raises after some looks: what was sent has left by then."""
    left = iter(range(looks))

    def check(missing: list[int]) -> None:
        if next(left, None) is None:
            raise TimeoutError

    return check


def test_streams_of_every_length(hosts: Sequence[HostInTest]) -> None:
    """Nothing, little, one more than a frame, several; other lengths in the other direction."""
    sizes = [0, 1, CHUNK - 1, CHUNK + 1, 7 * CHUNK]

    def lead(host: HostInTest) -> None:
        leader = host.begin(1)
        for step, size in enumerate(sizes):
            mine = size if host.index == step % 3 else 3
            text = f"{host.index}".encode()
            out = {to: [b"", text + f"{to}".encode(), memoryview(text * mine)] for to in range(3)}
            for source, (nothing, who, much) in leader.exchange(out, never).items():
                assert (bytes(nothing), bytes(who)) == (b"", f"{source}{host.index}".encode())
                assert bytes(much) == f"{source}".encode() * (size if source == step % 3 else 3)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lead, hosts, timeout=30))


def test_frames_that_come_before_the_task(hosts: Sequence[HostInTest]) -> None:
    """They wait until it begins; those of an ended one are dropped."""
    first = hosts[0].begin(1)
    with pytest.raises(TimeoutError):
        first.exchange({host: [b"late"] for host in (1, 2)}, giving_up(3))
    hosts[0].end(well=False)
    with ThreadPoolExecutor(3) as pool:
        early = pool.submit(hosts[0].begin(2).exchange, {host: [b"new"] for host in (1, 2)}, never)
        rest = [pool.submit(host.begin(2).exchange, {}, never) for host in hosts[1:]]
        assert [bytes(future.result(20)[0][0]) for future in rest] == [b"new", b"new"]
        early.result(20)


def test_the_end_of_a_host(hosts: Sequence[HostInTest]) -> None:
    """It is known behind everything that was sent before, however much that is."""
    leaders = [host.begin(1) for host in hosts]
    big = bytes(3 * CHUNK)
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(leader.exchange, {host: [big] for host in range(3)}, raising(leader))
            for leader in leaders
        ]
        assert all(len(part[0]) == len(big) for future in futures for part in future.result(20).values())
        hosts[2].end()
        again = [pool.submit(leader.exchange, {}, raising(leader)) for leader in leaders[:2]]
        for future in again:
            with pytest.raises(LookupError, match="c ENDED"):
                future.result(20)


def test_a_host_that_has_failed_says_nothing(hosts: Sequence[HostInTest]) -> None:
    """The kernel does; what it had sent arrives."""
    hosts[1].begin(1)
    leader = hosts[2].begin(1)
    with pytest.raises(TimeoutError):
        leader.exchange({0: [b"sent"]}, giving_up(3))
    hosts[2].end(well=False)
    first = hosts[0].begin(1)
    with pytest.raises(TimeoutError):
        first.exchange({}, giving_up(3))
    assert not first.ended


def test_a_link_that_is_closed(hosts: Sequence[HostInTest], loop: asyncio.AbstractEventLoop) -> None:
    """Leaders on both sides learn it, in this task and in later ones, until there is another link."""
    end = connect(loop, hosts[0], hosts[1])
    leader = hosts[0].begin(1)
    loop.call_soon_threadsafe(end.abort)
    with pytest.raises(LookupError, match="b CLOSED"):
        leader.exchange({1: [b"x"]}, raising(leader))
    wait_until(lambda: hosts[0].lost == [("b", 1)])
    hosts[0].end()
    leader = hosts[0].begin(2)
    with pytest.raises(LookupError, match="b CLOSED"):
        leader.exchange({1: [b"x"]}, raising(leader))
    assert hosts[0].lost == [("b", 1), ("b", 2)]  # the kernel did not know
    hosts[0].end()
    connect(loop, hosts[0], hosts[1])
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(host.begin(3).exchange, {1: [b"y"]}, never) for host in hosts]
        assert bytes(found[1].result(20)[0][0]) == b"y"
        assert not found[0].result(20)[1]


def test_a_link_that_is_replaced(hosts: Sequence[HostInTest], loop: asyncio.AbstractEventLoop) -> None:
    """Nothing of the former one is said to be lost, though only the other host has noticed its end."""
    connect(loop, hosts[0], hosts[1])
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(host.begin(1).exchange, {1: [b"y"]}, never) for host in hosts]
        assert bytes(found[1].result(20)[0][0]) == b"y"
    assert not any(host.lost for host in hosts)


def test_no_more_is_under_way_than_is_taken(
    hosts: Sequence[HostInTest], loop: asyncio.AbstractEventLoop
) -> None:
    """However much there is for a host that takes nothing: a frame, and what sockets hold."""
    leader, _ = hosts[0].begin(1), hosts[1].begin(1)
    end, count = connect(loop, hosts[0], hosts[1]), list[int]()
    end.before = lambda: count.append(1)
    with pytest.raises(TimeoutError):
        leader.exchange({1: [bytes(40 * CHUNK)]}, giving_up(20))
    assert 1 <= len(count) < 10
