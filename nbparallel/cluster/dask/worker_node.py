"""A node as the worker of its host sees it: a child process, a socket to it, connections with other workers.

Two facts about distributed (its source): a read or write of a connection that is cancelled aborts it, so
nothing here is cancelled but by the end of the loop; a connection that a handler is given is the worker's
again when it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from distributed.comm.core import connect
from distributed.protocol import to_serialize

from nbparallel.cluster.node_process import SIZES, last_lines, pack_head, start_process

NODE_SECONDS = 60.0
"""How long the process of a node may take to import what it needs."""
END_SECONDS = 4.0
"""How long a node may take to end before it is killed."""
LARGE = 1 << 16
"""Bytes that pass in a message as they are, and the scheduler once for all workers that they are sent to."""
_open_connection: Any = connect


def packed(content: Any) -> Any:
    """Return bytes as a part of a message; large ones are copied nowhere on their way but by the sockets."""
    return bytes(content) if len(content) < LARGE else to_serialize(np.frombuffer(content, np.uint8))


class WorkerNode:
    """A node as its worker sees it: a child process, and the socket to it.

    It is used in the worker's loop only.
    """

    def __init__(self, key: str, host: str, worker: Any) -> None:
        self.key, self.host, self._worker = key, host, worker
        self.topic = key.partition("/")[0]
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Done when the process is gone; says how."""
        self._started: asyncio.Future[str] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._sending = asyncio.Lock()
        self._links: dict[str, Any] = {}
        self._released = False

    async def start(self, spec: str) -> str:
        """Start the process; return why it could not be, or nothing."""
        self._process, self._socket, self._log = await asyncio.to_thread(start_process, self.host, spec)
        self._socket.setblocking(False)
        self._reading = asyncio.ensure_future(self._read())
        await asyncio.wait([self._started], timeout=NODE_SECONDS)
        problem = self._started.result() if self._started.done() else "its process did not start"
        if problem:
            problem = f"{problem}\n{last_lines(self._log)}".strip()
            await self.end()
        return problem

    async def _read(self) -> None:
        """Pass on what the node sends, until it ends."""
        try:
            with contextlib.suppress(OSError, EOFError):  # how it has ended is seen below
                while True:
                    length, nbytes = SIZES.unpack(await self._receive(SIZES.size))
                    head = json.loads(await self._receive(length))
                    await self._take(await self._receive(nbytes), **head)
            self._socket.close()
            code = await asyncio.to_thread(self._await_process)
        except asyncio.CancelledError:
            # The loop cancels this as it ends.  A worker that got SIGTERM while its scheduler closed it stays
            # alive then: distributed's `handle_scheduler` waits for a close that was cancelled.
            self._socket.close()
            threading.Thread(target=self._await_process, name="nbparallel-node-end", daemon=True).start()
            raise
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        for number in list(self._calls):
            self._settle(number, error="the node has ended")
        for comm in self._links.values():
            comm.abort()  # waits for no frozen peer: a call that came while it waited would have no reply
        if not self._started.done():
            self._started.set_result(f"its process ended ({how})")
        reason = f"its node, process {self._process.pid}, ended ({how})\n{last_lines(self._log)}".strip()
        self.ended.set_result("" if self._released else reason)

    def _await_process(self) -> int:
        """Return the exit code of the process, which ends with its socket, or is killed."""
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    async def _receive(self, nbytes: int) -> bytearray:
        """Return so many bytes of the node's, copied once; a stream of asyncio's copies large ones often."""
        data, at = bytearray(nbytes), 0
        while at < nbytes:
            count = await self._loop.sock_recv_into(self._socket, memoryview(data)[at:])
            if not count:
                raise EOFError
            at += count
        return data

    async def _take(
        self, content: bytearray, kind: str, name: str = "", number: int = 0, sizes: Sequence[int] = ()
    ) -> None:
        if kind == "event":
            self._worker.log_event(self.topic, {"key": self.key, "data": bytes(content)})
        elif kind == "reply":
            self._settle(number, data=bytes(content))
        elif kind == "error":
            self._settle(number, error=content.decode())
        elif kind in ("started", "failed"):
            self._started.set_result(content.decode())
        elif (comm := self._links.get(name)) is not None and kind == "link":
            with contextlib.suppress(OSError):  # it is closed: its reader says so
                await comm.write({"frame": packed(content), "sizes": sizes})
        elif comm is not None:
            await comm.close()
            self._unlink(name, comm)

    def _settle(self, number: int, **reply: Any) -> None:
        if not (call := self._calls.pop(number)).done():  # else it was cancelled with its handler
            call.set_result(reply)

    async def call(self, op: str, data: bytes, kind: str = "call") -> dict[str, Any]:
        """Have the node handle a call; return its reply."""
        if self.ended.done() or self._released:
            return {"error": "the node has ended"}
        self._number += 1
        reply: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._calls[self._number] = reply
        await self._send(data, kind, name=op, number=self._number)
        return await reply

    def _send(self, content: Any, kind: str, **what: Any) -> asyncio.Future[None]:
        """Send one frame, whole and in its turn also if its caller is cancelled."""
        return asyncio.shield(self._send_parts(pack_head(len(content), kind, **what), content))

    async def _send_parts(self, *parts: Any) -> None:
        async with self._sending:
            with contextlib.suppress(OSError):  # the node is gone: its reader says so
                for part in parts if sum(map(len, parts)) > LARGE else [b"".join(parts)]:
                    await self._loop.sock_sendall(self._socket, part)

    async def link(self, peer: str, comm: Any) -> None:
        """Have a link with a peer over a connection, until either is gone."""
        await self._set_link(peer, comm)
        with contextlib.suppress(OSError):  # it is closed: its reader says so
            await comm.write({"linked": True})
        await self._read_link(peer, comm)

    async def _set_link(self, peer: str, comm: Any) -> None:
        former, self._links[peer] = self._links.get(peer), comm
        if former is not None:  # only the peer has noticed its end
            former.abort()
        await self.call(peer, b"", "linked")
        if self.ended.done():  # and with it all links that it had
            comm.abort()

    async def _read_link(self, peer: str, comm: Any) -> None:
        """Pass on what comes from a peer."""
        try:
            while True:
                message = await comm.read()
                await self._send(message["frame"], "link", name=peer, sizes=message["sizes"])
        except (OSError, KeyError, TypeError):
            self._unlink(peer, comm)
            await comm.close()

    def _unlink(self, peer: str, comm: Any) -> None:
        if self._links.get(peer) is comm:
            del self._links[peer]
            self._send(b"", "unlinked", name=peer)

    async def connect(self, peer: str, address: str, key: str, timeout: float) -> str:
        """Connect with the node of another host; return why that is impossible, or nothing."""
        try:
            comm = await _open_connection(address, timeout=timeout, **self._worker.connection_args)
            await comm.write({"op": "nbp_link", "key": key, "peer": self.host, "reply": False})
            if "linked" not in await comm.read():
                return "it has no node of this session"
        except (OSError, TimeoutError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        await self._set_link(peer, comm)
        self._linked = asyncio.ensure_future(self._read_link(peer, comm))
        return ""

    async def end(self) -> None:
        """End the process (idempotent); returns when it is gone."""
        self._released = True
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)  # the node ends when its socket does
        await asyncio.wait([self.ended], timeout=END_SECONDS)  # not the future, which this would cancel
        if not self.ended.done():  # what it has sent may be on its way to a worker that takes nothing
            self._process.kill()
            for comm in self._links.values():
                comm.abort()
            await asyncio.wait([self.ended], timeout=END_SECONDS)
        self._log.close()
