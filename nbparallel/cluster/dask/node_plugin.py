"""The plugin that a worker gets: nodes of all sessions on its host, and the handlers that reach them.

Two facts about distributed (its source): registering a plugin again tears the first one down, so that it is
added once in a worker, for all sessions; a worker without a task is idle, and may be closed by adaptive
scaling or a time-out, and a task that has seceded keeps it and takes no thread of others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import distributed
from distributed.core import Status

from nbparallel.cluster.dask.worker_node import WorkerNode

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
        self._minding: asyncio.Future[None] | None = None
        """Ends the nodes of a worker that is closing: `teardown` may not be called, or much later."""
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
        problem = await node.start()
        if problem:
            return {"error": problem}
        if self.anchors[key].is_set():
            await node.end()
            return {"error": "its anchor was released"}
        self.nodes[key] = node
        if self._minding is None or self._minding.done():
            self._minding = asyncio.ensure_future(self._mind())
        return {"data": b""}

    async def _mind(self) -> None:
        while self.nodes:
            if self._worker.status not in (Status.running, Status.paused, Status.closing_gracefully):
                self._release(*self.anchors)
            await asyncio.sleep(MIND_SECONDS)

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
