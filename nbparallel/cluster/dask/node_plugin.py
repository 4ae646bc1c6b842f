"""The plugin that a worker gets: nodes of all sessions on its host, and the handlers that reach them.

Two facts about distributed (its source): registering a plugin again tears the first one down, so that it is
added once in a worker, for all sessions; a worker without a task is idle, and may be closed by adaptive
scaling or a time-out, and a task that has seceded keeps it and takes no thread of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
import time
from typing import Any

import distributed
import numpy as np
from distributed.comm.core import connect
from distributed.core import Status
from distributed.protocol import to_serialize

from nbparallel.cluster.host_links import HostLinks, receive_all, send_all
from nbparallel.cluster.node_process import HEAD, last_lines, start_process, unpack_head

PLUGIN = "nbparallel"
GONE = "no node of this session is here"
ANCHOR_SECONDS = 30.0
"""How long a worker may take to begin the task that anchors it: all its threads may be busy."""
MIND_SECONDS = 1.0
"""Between two looks whether the worker is closing."""
_dask: Any = distributed


class NodePlugin(distributed.WorkerPlugin):
    """Nodes of all sessions on one worker, and handlers, which the scheduler calls."""

    name = PLUGIN
    idempotent = True

    def setup(self, worker: Any) -> None:
        """Add the handlers."""
        self._worker = worker
        self.nodes: dict[str, WorkerNode] = {}
        self.anchors: dict[str, threading.Event] = {}
        self._minding = asyncio.ensure_future(self._mind())
        self._ending: set[asyncio.Future[None]] = set()
        worker.handlers.update(
            nbp_start=self.start, nbp_call=self.call, nbp_watch=self.watch, nbp_link=self.link,
            nbp_connect=self.connect,
        )  # fmt: skip

    def anchor(self, key: str) -> threading.Event:
        """Return what is set when the anchor of this key is released; from any thread."""
        return self.anchors.setdefault(key, threading.Event())

    async def start(self, key: str, host: str) -> dict[str, Any]:
        """Start a node, once its anchor holds."""
        deadline = time.monotonic() + ANCHOR_SECONDS
        while key not in self.anchors:
            if time.monotonic() > deadline:
                return {"error": f"its worker took no task in {ANCHOR_SECONDS:.0f} s: its threads are busy"}
            await asyncio.sleep(0.005)
        node = WorkerNode(key, host, self._worker)
        if problem := await node.start():
            return {"error": problem}
        if self.anchors[key].is_set():
            await node.end()
            return {"error": "its anchor was released"}
        self.nodes[key] = node
        return {"data": b""}

    async def _mind(self) -> None:
        """End the nodes of a worker that is closing: `teardown` may not be called, or much later."""
        alive = Status.init, Status.running, Status.paused, Status.closing_gracefully
        while self._worker.status in alive:
            await asyncio.sleep(MIND_SECONDS)
        self._release(*self.anchors)

    async def call(self, keys: list[str], call: str, data: bytes) -> dict[str, Any]:
        """Have the node that is here handle a call."""
        node = next((self.nodes[key] for key in keys if key in self.nodes), None)
        return {"error": GONE} if node is None else await node.call(call, data)

    async def watch(self, key: str) -> dict[str, Any]:
        """Return how a node has ended, when it has."""
        node = self.nodes.get(key)
        return {"ended": "" if node is None else await asyncio.shield(node.ended)}

    async def connect(self, key: str, peer: str, address: str, peer_key: str, timeout: float) -> Any:
        """Connect two nodes."""
        node = self.nodes.get(key)
        return {"error": GONE if node is None else await node.connect(peer, address, peer_key, timeout)}

    async def link(self, comm: Any, key: str, peer: str) -> Status:
        """Keep a connection for as long as it links two nodes."""
        node = self.nodes.get(key)
        if node is None:
            await comm.write({"gone": True})
            await comm.close()
        else:
            await node.link(peer, comm)
        return Status.dont_reply

    def transition(self, key: str, start: str, finish: str, **_: Any) -> None:
        """End a node when its anchor is no task of the worker's any more."""
        if key in self.anchors and finish not in ("waiting", "ready", "executing", "long-running"):
            self._release(key)

    def _release(self, *keys: str) -> None:
        for key in keys:
            self.anchors[key].set()
            if (node := self.nodes.pop(key, None)) is not None:
                ending = asyncio.ensure_future(node.end())
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    async def teardown(self, worker: Any) -> None:
        """End every node: the worker is closing."""
        self._release(*self.anchors)
        await asyncio.gather(*self._ending)


async def add_plugin(dask_worker: Any) -> None:
    """Add the plugin to a worker that has it not; runs there."""
    if PLUGIN not in dask_worker.plugins:
        await dask_worker.plugin_add(NodePlugin(), name=PLUGIN)


def hold(key: str) -> None:
    """Be the anchor: keep a worker until the task is released; runs there."""
    released = _dask.get_worker().plugins[PLUGIN].anchor(key)
    _dask.secede()
    released.wait()


# A node as the worker of its host sees it: a child process, sockets to it, connections with other workers.
#
# Two facts about distributed (its source): a read or write of a connection that is cancelled aborts it, so
# nothing here is cancelled but by the end of the loop; a connection that a handler is given is the worker's
# again when it returns.

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
    """A node as its worker sees it: a child process, and the sockets to it; for the worker's loop only."""

    def __init__(self, key: str, host: str, worker: Any) -> None:
        self.key, self.host, self._worker = key, host, worker
        self._topic = key.partition("/")[0]
        self.links = HostLinks(host, packed, lambda *link: self._emit(unlinked=link))
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the process is gone; says how."""
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """By number; 0 is the start of the process."""
        self._number = 0
        self._sending = asyncio.Lock()
        self._released = False

    def _emit(self, **event: Any) -> None:
        self._worker.log_event(self._topic, {"key": self.key, **event})

    async def start(self) -> str:
        """Start the process; return why it could not be, or nothing."""
        made = await asyncio.to_thread(start_process, self.host)
        self._process, self._socket, self._doors, self._log = made
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._doors, self._take_door)
        started = self._calls[0] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.ensure_future(self._read())
        await asyncio.wait([started], timeout=NODE_SECONDS)
        problem: str = started.result().get("error", "") if started.done() else "its process did not start"
        if problem:
            problem = f"{problem}\n{last_lines(self._log)}".strip()
            await self.end()
        return problem

    def _take_door(self) -> None:
        data, fds, *_ = socket.recv_fds(self._doors, LARGE, 1, socket.MSG_CMSG_CLOEXEC)
        if fds:
            task, hosts = json.loads(data)
            self.links.begin(task, hosts, socket.socket(fileno=fds[0]))
        else:  # the process has ended
            asyncio.get_running_loop().remove_reader(self._doors)

    async def _read(self) -> None:
        """Pass on what the node sends, until it ends."""
        try:
            with contextlib.suppress(OSError, EOFError):  # how it has ended is seen below
                while True:
                    kind, number, nbytes = unpack_head(await receive_all(self._socket, HEAD.size))
                    content = bytes(await receive_all(self._socket, nbytes))
                    if kind == "event":
                        self._emit(data=content)
                    elif kind == "reply":
                        self._settle(number, data=content)
                    else:
                        self._settle(number, error=content.decode())
            self._close()
            code = await asyncio.to_thread(self._await_process)
        except asyncio.CancelledError:
            # The loop cancels this as it ends.  A worker that got SIGTERM while its scheduler closed it stays
            # alive then: distributed's `handle_scheduler` waits for a close that was cancelled.
            self._close()
            threading.Thread(target=self._await_process, name="nbparallel-node-end", daemon=True).start()
            raise
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        for number in list(self._calls):
            self._settle(number, error="the node has ended" if number else f"its process ended ({how})")
        reason = f"its node, process {self._process.pid}, ended ({how})\n{last_lines(self._log)}".strip()
        self.ended.set_result("" if self._released else reason)

    def _close(self) -> None:
        """Close what connects the process (idempotent)."""
        if self._doors.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._doors)
        self.links.end()
        self._doors.close()
        self._socket.close()

    def _await_process(self) -> int:
        """Return the exit code of the process, which ends with its socket, or is killed."""
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _settle(self, number: int, **reply: Any) -> None:
        if not (call := self._calls.pop(number)).done():  # else it was cancelled with its handler
            call.set_result(reply)

    async def call(self, op: str, data: bytes) -> dict[str, Any]:
        """Have the node handle a call; return its reply."""
        if self.ended.done() or self._released:
            return {"error": "the node has ended"}
        self._number += 1
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[self._number] = reply
        head = HEAD.pack(op.encode(), self._number, len(data))
        await asyncio.shield(self._send(head, data))  # whole and in its turn also if the caller is cancelled
        return await reply

    async def _send(self, *parts: Any) -> None:
        async with self._sending:
            with contextlib.suppress(OSError):  # the node is gone: its reader says so
                await send_all(self._socket, *parts)

    async def link(self, peer: str, comm: Any) -> None:
        """Have a link with a peer over a connection, until either is gone."""
        self._connect(peer, comm)
        with contextlib.suppress(OSError):  # it is closed: its reader says so
            await comm.write({"linked": True})
        await self.links.read(peer, comm)

    def _connect(self, peer: str, comm: Any) -> None:
        self.links.connect(peer, comm)
        if self.ended.done():  # and with it all links that it had
            self.links.end()

    async def connect(self, peer: str, address: str, key: str, timeout: float) -> str:
        """Connect with the node of another host; return why that is impossible, or nothing."""
        try:
            comm = await _open_connection(address, timeout=timeout, **self._worker.connection_args)
            await comm.write({"op": "nbp_link", "key": key, "peer": self.host, "reply": False})
            if "linked" not in await comm.read():
                return "it has no node of this session"
        except (OSError, TimeoutError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        self._connect(peer, comm)
        self.links.run(self.links.read(peer, comm))
        return ""

    async def end(self) -> None:
        """End the process (idempotent); returns when it is gone."""
        self._released = True
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)  # the node ends when its socket does
        await asyncio.wait([self.ended], timeout=2 * END_SECONDS)  # not the future, which this would cancel
        self._log.close()
