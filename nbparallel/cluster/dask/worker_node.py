"""A node as the worker of its host sees it: a child process, a socket to it, connections with other workers.

Two facts about distributed (its source): a read or write of a connection that is cancelled aborts it, so
nothing here is cancelled; a connection that a handler is given is the worker's again when it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from typing import Any

from distributed.comm.core import connect

from nbparallel.cluster.node_process import (
    HEADER,
    MOST_FRAME,
    FrameKind,
    last_lines,
    named,
    split_name,
    start_process,
)

NODE_SECONDS = 60.0
"""How long the process of a node may take to import what it needs."""
END_SECONDS = 4.0
"""How long a node may take to end before it is killed."""
_open_connection: Any = connect


class WorkerNode:
    """A node as its worker sees it: a child process, and the socket to it.

    It is used in the worker's loop only.
    """

    def __init__(self, key: str, host: str, worker: Any) -> None:
        self.key, self.host, self._worker = key, host, worker
        self.topic = key.partition("/")[0]
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the process is gone; says how."""
        self._started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._links: dict[str, Any] = {}
        self._released = False

    async def start(self, spec: str) -> str:
        """Start the process; return why it could not be, or nothing."""
        self._process, sock, self._log = await asyncio.to_thread(start_process, self.host, spec)
        reader, self._writer = await _open(sock)
        self._reading = asyncio.ensure_future(self._read(reader))
        await asyncio.wait([self._started, self.ended], timeout=NODE_SECONDS, return_when="FIRST_COMPLETED")
        problem = self._started.result() if self._started.done() else "its process did not start"
        if problem:
            lines = last_lines(self._log)
            await self.end()
            return f"{problem}\n{lines}".strip()
        return ""

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Pass on what the node sends, until it ends."""
        reason = ""
        try:
            while True:
                kind, number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                if size > MOST_FRAME:
                    break
                await self._take(kind, number, await reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            pass  # how it has ended is seen below
        self._writer.close()
        try:
            code = await asyncio.to_thread(self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not self._released:
            reason = f"its node, process {self._process.pid}, ended ({how})\n{last_lines(self._log)}".strip()
        for call in self._calls.values():
            if not call.done():
                call.set_result({"error": "the node has ended"})
        for comm in list(self._links.values()):
            await comm.close()
        if not self._started.done():
            self._started.set_result(f"its process ended ({how})")
        self.ended.set_result(reason)

    async def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind == FrameKind.EVENT:
            self._worker.log_event(self.topic, {"key": self.key, "data": payload})
        elif kind in (FrameKind.REPLY, FrameKind.ERROR):
            if (call := self._calls.pop(number, None)) is not None and not call.done():
                ok = kind == FrameKind.REPLY
                call.set_result({"data": payload} if ok else {"error": payload.decode()})
        elif kind in (FrameKind.STARTED, FrameKind.FAILED):
            self._started.set_result(payload.decode())
        elif kind in (FrameKind.LINK, FrameKind.UNLINKED):
            peer, frame = split_name(payload)
            comm = self._links.get(peer)
            if comm is not None and kind == FrameKind.LINK:
                with contextlib.suppress(OSError):  # it is closed: its reader says so
                    await comm.write({"frame": frame})
            elif comm is not None:
                await comm.close()
                self._unlink(peer, comm)

    async def call(self, op: str, data: bytes, kind: FrameKind = FrameKind.CALL) -> dict[str, Any]:
        """Have the node handle a call; return its reply."""
        if self.ended.done() or self._released:
            return {"error": "the node has ended"}
        self._number += 1
        reply = self._calls[self._number] = asyncio.get_running_loop().create_future()
        await self._send(kind, named(op, data), self._number)
        found: dict[str, Any] = await reply
        return found

    async def _send(self, kind: FrameKind, payload: bytes, number: int = 0) -> None:
        self._writer.write(HEADER.pack(kind, number, len(payload)))
        self._writer.write(payload)
        with contextlib.suppress(OSError):  # the node is gone: its reader says so
            await self._writer.drain()

    async def link(self, peer: str, comm: Any) -> None:
        """Have a link with a peer over a connection, until either is gone."""
        self._links[peer] = comm
        await self.call(peer, b"", FrameKind.LINKED)
        await comm.write({"linked": True})
        await self.read_link(peer, comm)

    async def read_link(self, peer: str, comm: Any) -> None:
        """Pass on what comes from a peer."""
        try:
            while True:
                message = await comm.read()
                await self._send(FrameKind.LINK, named(peer, message["frame"]))
        except (OSError, KeyError, TypeError):
            self._unlink(peer, comm)
            await comm.close()

    def _unlink(self, peer: str, comm: Any) -> None:
        if self._links.get(peer) is comm:
            del self._links[peer]
            self._writer.write(HEADER.pack(FrameKind.UNLINKED, 0, len(named(peer))) + named(peer))

    async def connect(self, peer: str, address: str, key: str, timeout: float) -> str:
        """Connect with the node of another host; return why that is impossible, or nothing."""
        try:
            comm = await _open_connection(address, timeout=timeout, **self._worker.connection_args)
            await comm.write({"op": "nbp_link", "key": key, "peer": self.host, "reply": False})
            if "linked" not in await comm.read():
                return "it has no node of this session"
        except (OSError, TimeoutError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        self._links[peer] = comm
        await self.call(peer, b"", FrameKind.LINKED)
        self._linked = asyncio.ensure_future(self.read_link(peer, comm))
        return ""

    async def end(self) -> None:
        """End the process (idempotent); returns when it is gone."""
        self._released = True
        if hasattr(self, "_writer"):
            self._writer.close()  # it ends when the socket does
            await asyncio.wait([self.ended])  # not the future itself, which would be cancelled with this
            self._log.close()


async def _open(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock.setblocking(False)
    return await asyncio.open_unix_connection(sock=sock)
