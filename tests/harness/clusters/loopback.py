"""Loopback: a cluster inside of this process, whose hosts are objects; for tests, without any network.

Tests can lose a host, or silence it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nbparallel.cluster.contract import (
    MOST_EVENT,
    ClusterNode,
    EventHandler,
    Host,
    Link,
    NodeReply,
    load_node,
)
from nbparallel.errors import ChannelClosedError, StartError

END_SECONDS = 3.0
"""How long nodes may take to end."""
_ENDED: tuple[bytes, ...] = ()
"""Stands in a queue of frames where the link was closed."""


class LoopbackLink:
    """One end of a link: what it sends is in the other's queue."""

    def __init__(self, peer: str) -> None:
        self._peer, self._frames = peer, queue.SimpleQueue[tuple[bytes, ...]]()
        self._other: LoopbackLink = self
        self._closed = False

    @classmethod
    def pair(cls, one: str, other: str) -> tuple[LoopbackLink, LoopbackLink]:
        """Return both ends: that of host `one`, that of `other`."""
        mine, theirs = cls(other), cls(one)
        mine._other, theirs._other = theirs, mine
        return mine, theirs

    def send(self, *buffers: bytes | memoryview) -> None:
        # docstring inherited
        if self._closed:
            raise self._gone()
        self._other._frames.put(tuple(map(bytes, buffers)) or (b"",))

    def receive(self, timeout: float) -> tuple[bytes, ...]:
        # docstring inherited
        try:
            frame = self._frames.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no frame of host {self._peer} within {timeout:g} s") from None
        if frame is _ENDED:
            self._frames.put(_ENDED)
            raise self._gone()
        return frame

    def close(self) -> None:
        # docstring inherited
        for end in (self, self._other):
            if not end._closed:
                end._closed = True
                end._frames.put(_ENDED)

    def _gone(self) -> ChannelClosedError:
        return ChannelClosedError(f"the link with host {self._peer} is closed")


class LoopbackHost:
    """A host and its node: the anchor, and the node's port."""

    def __init__(self, host: str, handler: EventHandler, node: str) -> None:
        self.host, self._handler = host, handler
        self.links: dict[str, LoopbackLink] = {}
        self.given_up = False
        """Whether the host has not answered."""
        self.frozen = threading.Event()
        """While it is set, no call begins and no event leaves."""
        self._released, self._beginning = threading.Lock(), threading.Lock()
        self.finished = threading.Event()
        """Set when its node has ended."""
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._node: ClusterNode = load_node(node)(self)
        for tasks in (self._events, self._calls):
            threading.Thread(
                target=self._perform, args=(tasks,), name=f"loopback-{host}", daemon=True
            ).start()

    def _perform(self, tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            while self.frozen.is_set() and not self._released.locked():
                time.sleep(0.001)
            task()

    def emit(self, data: bytes) -> None:
        # docstring inherited
        if len(data) > MOST_EVENT:
            raise ValueError(f"an event has at most {MOST_EVENT} bytes, not {len(data)}")
        self._events.put(partial(self._handler.event, self.host, bytes(data)))

    def link(self, peer: str) -> Link:
        # docstring inherited
        return self.links[peer]

    def begin(self, op: str, data: bytes, done: Callable[[NodeReply], None]) -> None:
        """Have the node handle a call."""

        def handle() -> None:
            try:
                done(NodeReply(self._node.handle(op, data)))
            except Exception as error:  # noqa: BLE001  whatever the node raises is the caller's to read
                done(NodeReply(error=f"{type(error).__name__}: {error}"))

        name = f"loopback-{self.host}-{op}"
        with self._beginning:
            if not self._released.locked():
                self._calls.put(lambda: threading.Thread(target=handle, name=name, daemon=True).start())
                return
        done(NodeReply(error="the host is lost"))

    def lose(self, reason: str) -> None:
        """Lose the host: its node ends without a word, then the session learns why."""
        told = threading.Event()

        def tell() -> None:
            self._handler.lost(self.host, reason)
            told.set()

        self._end(tell)
        told.wait(END_SECONDS)  # else the next task may be sent to it

    def release(self, *, give_up: bool = False) -> None:
        # docstring inherited
        self.given_up |= give_up
        self._end(None)

    def _end(self, last: Callable[[], None] | None) -> None:
        if not self._released.acquire(blocking=False):
            return
        for link in self.links.values():
            link.close()
        with self._beginning:  # no call comes behind this
            self._calls.put(None)
        if last is not None:
            self._events.put(last)
        threading.Thread(target=self._finish, name=f"loopback-{self.host}-end", daemon=True).start()

    def _finish(self) -> None:
        self._node.end()
        self._events.put(None)
        self.finished.set()

    @property
    def ended(self) -> bool:
        """Whether it was released or lost."""
        return self._released.locked()


class Loopback:
    """A cluster whose hosts are objects of this process.

    Parameters
    ----------
    names : sequence of str
        Names of the hosts.
    cpus : int
        Of each.
    """

    address = "loopback://"
    """It is inside of this process."""

    def __init__(self, names: Sequence[str], cpus: int = 2) -> None:
        self._names, self._cpus = sorted(names), cpus
        self._handler: EventHandler | None = None
        self.nodes: dict[str, LoopbackHost] = {}
        """By host: the one that was anchored last."""

    def hosts(self) -> tuple[Host, ...]:
        # docstring inherited
        given_up = {name for name, node in self.nodes.items() if node.given_up}
        return tuple(Host(name, self._cpus) for name in self._names if name not in given_up)

    def events(self, handler: EventHandler) -> None:
        # docstring inherited
        self._handler = handler

    def anchor(self, host: str, node: str) -> LoopbackHost:
        # docstring inherited
        if host not in self._names or self._handler is None:
            raise StartError(f"host {host} is not in the cluster")
        try:
            made = self.nodes[host] = LoopbackHost(host, self._handler, node)
        except Exception as error:  # what makes the node may raise anything
            raise StartError(f"the node of host {host} did not start: {error}") from error
        return made

    def call(self, op: str, data: Mapping[str, bytes], timeout: float) -> dict[str, NodeReply]:
        # docstring inherited
        replies = {host: NodeReply(error="the host is lost") for host in data}
        arrived: queue.SimpleQueue[tuple[str, NodeReply]] = queue.SimpleQueue()
        asked = [host for host in data if host in self.nodes and not self.nodes[host].ended]
        for host in asked:
            replies[host] = NodeReply(silent=True)
            self.nodes[host].begin(op, data[host], lambda reply, host=host: arrived.put((host, reply)))  # type: ignore[misc]
        deadline = time.monotonic() + timeout
        for _ in asked:
            try:
                host, reply = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            replies[host] = reply
        return replies

    def link(self, one: str, other: str, timeout: float) -> None:
        # docstring inherited
        ends = self.nodes[one], self.nodes[other]
        if any(end.ended for end in ends):
            raise StartError(f"hosts {one} and {other} cannot reach each other: one of them is lost")
        ends[0].links[other], ends[1].links[one] = LoopbackLink.pair(one, other)

    def lose(self, host: str, reason: str = "its process ended") -> None:
        """Lose a host: it is not listed any more."""
        self._names.remove(host)
        self.nodes[host].lose(reason)

    def close(self) -> None:
        # docstring inherited
        for node in self.nodes.values():
            node.release()
        for node in self.nodes.values():
            node.finished.wait(END_SECONDS)
        self._handler = None
