"""Loopback: a cluster inside of this process, whose hosts are objects; for tests, without any network.

Tests can lose a host, silence it, or break the connection of two.  Calls and events are those of Dask's
cluster, frames between hosts are carried by what carries them there.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbparallel.cluster.host_links import HostLinks
from nbparallel.cluster.host_messages import NodeReply
from nbparallel.cluster.node_process import start_node
from nbparallel.errors import StartError

if TYPE_CHECKING:
    from nbparallel.session import Session

END_SECONDS = 3.0
"""How long nodes may take to end."""


def session_messages(session: Session) -> queue.SimpleQueue[Any]:
    """Return what the hosts of a started session have sent, and it has not yet handled."""
    messages: queue.SimpleQueue[Any] = session._ranks.messages  # type: ignore[attr-defined]  # of its hosts
    return messages


MOST_MESSAGES = 2
"""What a connection holds."""


class LoopbackConnection:
    """One end of a connection, as Dask has them: what it writes is in the other's queue."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._came, self._taken = asyncio.Event(), asyncio.Event()
        self._other = self
        self._closed = False
        self.before: Callable[[], None] = int
        """Called before each message that it writes."""

    @classmethod
    def pair(cls) -> tuple[LoopbackConnection, LoopbackConnection]:
        """Return both ends; to be called in the loop."""
        mine, theirs = cls(), cls()
        mine._other, theirs._other = theirs, mine
        return mine, theirs

    async def write(self, message: Any) -> None:
        """Write a message, as soon as there is room."""
        self.before()
        while len(self._other._messages) >= MOST_MESSAGES and not self._closed:
            self._other._taken.clear()
            await self._other._taken.wait()
        if self._closed:
            raise OSError("it is closed")
        self._other._messages.append({**message, "payload": bytes(message["payload"])})
        self._other._came.set()

    async def read(self) -> Any:
        """Return the next message; OSError when either end was closed."""
        while not self._messages and not self._closed:
            self._came.clear()
            await self._came.wait()
        if not self._messages:
            raise OSError("it is closed")
        self._taken.set()
        return self._messages.popleft()

    def abort(self) -> None:
        """Close both ends; in the loop."""
        for end in (self, self._other):
            end._closed = True
            end._came.set()
            end._taken.set()

    async def close(self) -> None:
        """Do the same."""
        self.abort()


class LoopbackHost:
    """A host and its node: the anchor, and the node's port."""

    def __init__(self, host: str, handler: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.host, self._handler, self.loop = host, handler, loop
        self.connections: dict[str, LoopbackConnection] = {}
        self.given_up = False
        """Whether the host has not answered."""
        self.frozen = threading.Event()
        """While it is set, no call begins and no event leaves."""
        self._released, self._beginning = threading.Lock(), threading.Lock()
        self.finished = threading.Event()
        """Set when its node has ended."""
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.links = self._in_loop(
            lambda: HostLinks(host, bytes, lambda *link: self._pass_on("unlinked", *link))
        )
        self._node = start_node(self)
        for tasks in (self._events, self._calls):
            threading.Thread(
                target=self._perform, args=(tasks,), name=f"loopback-{host}", daemon=True
            ).start()

    def _in_loop(self, make: Callable[[], Any]) -> Any:
        return in_loop(self.loop, make)

    def _perform(self, tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            while self.frozen.is_set() and not self._released.locked():
                time.sleep(0.001)
            task()

    def _pass_on(self, what: str, *content: Any) -> None:
        self._events.put(lambda: getattr(self._handler, what)(self.host, *content))

    def emit(self, data: bytes) -> None:
        """Send an event, as a node does."""
        self._pass_on("event", bytes(data))

    def open_door(self, task: int, hosts: Sequence[str], door: socket.socket) -> None:
        """Have frames carried, as a node does."""
        mine = socket.socket(fileno=os.dup(door.fileno()))
        self._in_loop(lambda: self.links.begin(task, hosts, mine))

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
        """End the node, as an anchor does."""
        self.given_up |= give_up
        self._end(None)

    def _end(self, last: Callable[[], None] | None) -> None:
        if not self._released.acquire(blocking=False):
            return
        self.loop.call_soon_threadsafe(self.links.end)
        with self._beginning:  # no call comes behind this
            self._calls.put(None)
        if last is not None:
            self._events.put(last)
        threading.Thread(target=self._finish, name=f"loopback-{self.host}-end", daemon=True).start()

    def _finish(self) -> None:
        self._node.stop()
        self._events.put(None)
        self.finished.set()

    def connect(self, other: LoopbackHost) -> None:
        """Connect two hosts."""

        def begin() -> None:
            for one, another, end in zip(
                (self, other), (other, self), LoopbackConnection.pair(), strict=True
            ):
                one.connections[another.host] = end
                one.links.connect(another.host, end)
                one.links.run(one.links.read(another.host, end))

        self._in_loop(begin)

    def break_link(self, other: str) -> None:
        """Have a connection break."""
        self.loop.call_soon_threadsafe(self.connections[other].abort)

    @property
    def ended(self) -> bool:
        """Whether it was released or lost."""
        return self._released.locked()


def in_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> Any:
    """Return what a function returns in a loop's thread."""

    async def run() -> Any:
        return make()

    return asyncio.run_coroutine_threadsafe(run(), loop).result(20)


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
    advice = "start a worker"

    def __init__(self, names: Sequence[str], cpus: int = 2) -> None:
        self._names, self._cpus = sorted(names), cpus
        self._handler: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loopback-loop", daemon=True)
        self.nodes: dict[str, LoopbackHost] = {}
        """By host: the one that was anchored last."""

    def hosts(self) -> dict[str, int]:
        """Return how many ranks each host is meant to hold."""
        given_up = {name for name, node in self.nodes.items() if node.given_up}
        return {name: self._cpus for name in self._names if name not in given_up}

    def events(self, handler: Any) -> None:
        """Pass events to `handler`."""
        self._handler = handler
        self._thread.start()

    def anchor(self, host: str) -> LoopbackHost:
        """Start a node."""
        if host not in self._names or self._handler is None:
            raise StartError(f"host {host} is not in the cluster")
        made = self.nodes[host] = LoopbackHost(host, self._handler, self._loop)
        return made

    def call(self, op: str, data: Mapping[str, bytes], timeout: float) -> dict[str, NodeReply]:
        """Have nodes handle calls."""
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
        """Connect two hosts."""
        ends = self.nodes[one], self.nodes[other]
        if any(end.ended for end in ends):
            raise StartError(f"hosts {one} and {other} cannot reach each other: one of them is lost")
        ends[0].connect(ends[1])

    def lose(self, host: str, reason: str = "its process ended") -> None:
        """Lose a host: it is not listed any more."""
        self._names.remove(host)
        self.nodes[host].lose(reason)

    def close(self) -> None:
        """Release every anchor, and wait until the nodes have ended."""
        for node in self.nodes.values():
            node.release()
        for node in self.nodes.values():
            node.finished.wait(END_SECONDS)
        if self._thread.is_alive():
            in_loop(self._loop, int)  # what was scheduled before has run
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_SECONDS)
        if not self._loop.is_closed():
            self._loop.close()
        self._handler = None
