"""Links: connections of a host with the others, over which ranks of hosts exchange frames.

A task whose ranks are on several hosts has a *door*: a socketpair.  One end is its node's, which takes what
comes there without waiting for any rank (`host_mail`), the other end is here, in the process that has the
connections.  What comes for a task that this host has not begun waits where it is; what comes for one that
has ended is dropped.  A frame is read only when the one before has been taken: so no process on the way
holds more than one for each host.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from nbparallel.wire.frames import DOOR_HEAD, MailKind
from nbparallel.wire.system import JOINED_NBYTES


async def receive_all(sock: socket.socket, nbytes: int) -> bytearray:
    """Return so many bytes, copied once: a stream of asyncio's copies large ones often."""
    data, at = bytearray(nbytes), 0
    while at < nbytes:
        count = await asyncio.get_running_loop().sock_recv_into(sock, memoryview(data)[at:])
        if not count:
            raise EOFError
        at += count
    return data


async def send_all(sock: socket.socket, *parts: Any) -> None:
    """Send parts one behind the other; short ones joined."""
    for part in parts if sum(map(len, parts)) > JOINED_NBYTES else [b"".join(parts)]:
        await asyncio.get_running_loop().sock_sendall(sock, part)


class HostLinks:
    """Connections of one host with the others, and the door of the task that uses them; in one event loop.

    A connection has `read`, `write`, `close` and `abort`, as those of Dask; `pack` makes bytes a part of a
    message that is written.  `lost` is called with the name of a host to which there is no connection any
    more, and the number of the last task that this host has begun.
    """

    def __init__(self, host: str, pack: Callable[[Any], Any], lost: Callable[[str, int], None]) -> None:
        self._host, self._pack, self._lost = host, pack, lost
        self._connections: dict[str, tuple[Any, asyncio.Lock]] = {}
        """And the lock of its writer."""
        self._task, self._hosts = 0, list[str]()
        self._door: socket.socket | None = None
        self._begun, self._delivering = asyncio.Event(), asyncio.Lock()
        self._running = set[asyncio.Future[None]]()

    def begin(self, task: int, hosts: Sequence[str], door: socket.socket) -> None:
        """Carry the frames of a task of these hosts, this one among them; the door belongs to this object."""
        door.setblocking(False)
        self._task, self._hosts, self._door = task, list(hosts), door
        self._begun.set()
        self._begun = asyncio.Event()
        self.run(self._serve(door, task, hosts))
        for name in set(hosts) - self._connections.keys() - {self._host}:
            self._lost(name, task)  # else it would have been connected again
            self.run(self._deliver(name, task, MailKind.CLOSED))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine of this object beside its caller."""
        running = asyncio.ensure_future(coroutine)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _serve(self, door: socket.socket, task: int, hosts: Sequence[str]) -> None:
        """Pass on the frames of this host's node, until the last."""
        waiting = set(hosts) - {self._host}
        with contextlib.suppress(OSError, EOFError):  # the task has failed: the kernel notifies the others
            while True:
                to, kind, length = DOOR_HEAD.unpack(await receive_all(door, DOOR_HEAD.size))
                await self._send(hosts[to], task, kind, await receive_all(door, length))
                waiting -= {hosts[to]} if kind == MailKind.ENDED else set()
        with contextlib.suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)  # what is being delivered ends
        async with self._delivering:
            self._door = None if self._door is door else self._door
            door.close()
        for name in waiting:  # a task that failed has sent no end, and others wait for it
            await self._send(name, task, MailKind.ENDED, b"")

    async def _send(self, name: str, task: int, kind: int, payload: Any) -> None:
        if name in self._connections:
            connection, turn = self._connections[name]
            async with turn:
                with contextlib.suppress(OSError):  # it is closed: its reader says so
                    await connection.write({"head": (task, kind), "payload": self._pack(payload)})

    async def _deliver(self, name: str, task: int, kind: int, payload: Any = b"") -> None:
        """Pass a frame of another host's on to the node of this one."""
        while task > self._task:
            await self._begun.wait()
        async with self._delivering:
            if task == self._task and self._door is not None:
                head = DOOR_HEAD.pack(self._hosts.index(name), kind, len(payload))
                with contextlib.suppress(OSError):  # the task has ended
                    await send_all(self._door, head, payload)

    def connect(self, name: str, connection: Any) -> None:
        """Use a connection with another host from now on; the caller has it read."""
        former, self._connections[name] = self._connections.get(name), (connection, asyncio.Lock())
        if former is not None:  # only the other host has noticed its end
            former[0].abort()

    async def read(self, name: str, connection: Any) -> None:
        """Pass on what comes from another host, until the connection is gone."""
        with contextlib.suppress(OSError):
            while True:
                message = await connection.read()
                task, kind = message["head"]
                await self._deliver(name, task, kind, message["payload"])
        if name in self._connections and self._connections[name][0] is connection:
            del self._connections[name]
            self._lost(name, self._task)
            await self._deliver(name, self._task, MailKind.CLOSED)
        await connection.close()

    def end(self) -> None:
        """Close all connections, without a word (idempotent)."""
        connections, self._connections = self._connections, {}
        for connection, _ in connections.values():
            connection.abort()  # waits for no frozen host
        if self._door is not None:
            with contextlib.suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)
        self._task = sys.maxsize
        self._begun.set()
