"""Node: what runs on each host of a session, and performs there what the kernel asks for."""

from __future__ import annotations

import json
import pickle
import platform
import struct
import sys
import threading
import time
from typing import Any

import numpy as np

import nbparallel
from nbparallel.cluster.contract import MOST_PIECE, NodePort
from nbparallel.cluster.host_messages import INLINE, HostReport, HostStart, HostTask, send_message
from nbparallel.cluster.node_output import NodeOutput
from nbparallel.cluster.node_session import NodeSession
from nbparallel.errors import NbParallelError, host_of_rank
from nbparallel.session.processes.rank_death import RankDeath
from nbparallel.wire.messages import Outcome

NODE = "nbparallel.cluster.node:Node"
"""What an adapter is asked to start."""
NUMBER = struct.Struct("<QQ")
"""Begins the data of most calls: a task's number, and what the call says of it."""
BEGIN_SECONDS = 5.0
"""How long a task may take to get hold of the ranks; another one has them only by mistake."""


class Node:
    """A host's ranks, for the kernel; each of its calls is a method.

    Parameters
    ----------
    port : NodePort
        Where events go.
    """

    def __init__(self, port: NodePort) -> None:
        self.port = port
        self._session: NodeSession | None = None
        self._pieces: dict[int, list[bytes]] = {}
        self._reports: dict[int, bytes] = {}
        self._ended = False

    def handle(self, op: str, data: bytes) -> bytes:
        """Handle a call of the kernel: a method of that name."""
        method = getattr(self, f"_on_{op}", None)
        if method is None or self._ended:
            raise ValueError(f"a node has no call {op!r}" if method is None else "the node has ended")
        found: bytes = method(data)
        return found

    def end(self) -> None:
        """End every rank (idempotent)."""
        self._ended = True
        if self._session is not None:
            self._session.stop()

    # calls --------------------------------------------------------------------------------------------

    def _on_hello(self, _data: bytes) -> bytes:
        """Return what must be alike on all hosts, as text that any version can read."""
        return json.dumps(versions()).encode()

    def _on_start(self, data: bytes) -> bytes:
        start: HostStart = pickle.loads(data)
        host_of_rank.set(start.place.host_of)
        self._session = session = NodeSession(start.place, start.start_method, self._on_event)
        self._host_of = start.place.host_of
        if self._ended:  # `end` has found no session
            session.stop()
            raise NbParallelError("the node has ended")
        session.start()
        return b""

    def _on_put(self, data: bytes) -> bytes:
        """Take a piece of a task that is too large for one call."""
        number, _ = NUMBER.unpack_from(data)
        self._pieces.setdefault(number, []).append(data[NUMBER.size :])
        return b""

    def _on_task(self, data: bytes) -> bytes:
        """Begin a task; what it prints and how it ends are events."""
        number, _ = NUMBER.unpack_from(data)
        pieces = [*self._pieces.pop(number, ()), data[NUMBER.size :]]
        self._pieces.clear()  # of a task that was never sent whole
        task: HostTask = pickle.loads(b"".join(pieces))
        self._reports.clear()
        begun = threading.Event()
        threading.Thread(
            target=self._perform, args=(self._running, task, begun), name="nbparallel-task", daemon=True
        ).start()
        if not begun.wait(BEGIN_SECONDS):
            raise NbParallelError("the ranks are busy with something else")
        return b""

    def _on_take(self, data: bytes) -> bytes:
        """Return a piece of a report that is too large for an event."""
        number, start = NUMBER.unpack_from(data)
        return self._reports[number][start : start + MOST_PIECE]

    def _on_interrupt(self, data: bytes) -> bytes:
        _, times = NUMBER.unpack_from(data)
        for _ in range(times):
            self._running.interrupt()
        return b""

    def _on_peer_failed(self, data: bytes) -> bytes:
        self._running.peer_failed(NUMBER.unpack_from(data)[0])
        return b""

    def _on_ready(self, _data: bytes) -> bytes:
        """Start ranks again that have died; return which were since the last time."""
        host_of_rank.set(self._host_of)
        return json.dumps(self._running.take_revived()).encode()

    def _on_restart(self, data: bytes) -> bytes:
        rank = int(data)
        self._running.restart(None if rank < 0 else rank)
        return b""

    def _on_look(self, _data: bytes) -> bytes:
        """Show that this node and its connection work, by an event as output is."""
        send_message(self.port.emit, "here")
        return b""

    # tasks --------------------------------------------------------------------------------------------

    @property
    def _running(self) -> NodeSession:
        if self._session is None:
            raise NbParallelError("the ranks of this host were not started")
        return self._session

    def _perform(self, session: NodeSession, task: HostTask, begun: threading.Event) -> None:
        host_of_rank.set(self._host_of)  # of this thread's messages
        output = NodeOutput(self.port, task.number)
        try:
            report = session.perform_task(task, output, begun.set)
        except BaseException as error:  # noqa: BLE001  whatever it is, the kernel waits for it
            report = HostReport(error=f"{type(error).__name__}: {error}")
        finally:
            output.close()
        begun.set()
        data = pickle.dumps(report, 5)
        inline = data if len(data) <= INLINE else b""
        if not inline:
            self._reports[task.number] = data
        send_message(self.port.emit, "ended", task.number, len(data), inline)

    def _on_event(self, message: Any) -> None:
        if isinstance(message, RankDeath) and not self._ended:
            send_message(self.port.emit, "died", time.monotonic_ns())
        elif isinstance(message, Outcome) and not message.ok:
            send_message(self.port.emit, "failed", message.number)


def versions() -> dict[str, str]:
    """Return what the kernel and all hosts must have in common."""
    return {
        "system": sys.platform,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "nbparallel": nbparallel.__version__,
        "numpy": np.__version__.partition(".")[0],
    }
