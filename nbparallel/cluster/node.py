"""Node: what runs on each host of a session, and performs there what the kernel asks for."""

from __future__ import annotations

import contextvars
import pickle
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from nbparallel.cluster.contract import NodePort
from nbparallel.cluster.host_messages import (
    INLINE,
    PIECE,
    FailureNotice,
    HostReport,
    HostTask,
    notice_of,
    send_message,
    versions,
)
from nbparallel.cluster.node_links import NodeLinks
from nbparallel.cluster.node_output import NodeOutput
from nbparallel.cluster.node_session import NodeSession
from nbparallel.errors import NbParallelError, host_of_rank
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.session.processes.rank_death import RankDeath
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.messages import Outcome

BEGIN_SECONDS = 5.0
"""How long a task may take to get hold of the ranks; another one has them only by mistake."""


class Node:
    """A host's ranks, for the kernel; each of its calls is a method, data and reply are pickled.

    Parameters
    ----------
    port : NodePort
        Where events go.
    launch : SupervisorLaunch
        The supervisor of the ranks, which belongs to this object from now on.
    """

    def __init__(self, port: NodePort, launch: SupervisorLaunch) -> None:
        self.port = port
        self._launch: SupervisorLaunch | None = launch
        self._owning = threading.Lock()
        self._session: NodeSession | None = None
        self._pieces: list[bytes] = []
        self._report = b""
        self._ended = False
        self._links = NodeLinks(port, partial(send_message, port.emit, "unlinked"))

    def handle(self, op: str, data: bytes) -> bytes:
        """Handle a call of the kernel: a method of that name."""
        if self._session is not None:
            host_of_rank.set(self._session.place.host_of)  # each call has a thread, and its context
        if op == "fill":  # the piece stands behind what was pickled
            number, start, size = pickle.loads(data)
            self._running.arrays.fill(number, start, memoryview(data)[-size:])
            return pickle.dumps(None)
        return pickle.dumps(getattr(self, f"_on_{op}")(*pickle.loads(data)), 5)

    def end(self) -> None:
        """End every rank (idempotent)."""
        self._links.close()
        with self._owning:
            self._ended = True
            launch, self._launch = self._launch, None
        if self._session is not None:
            self._session.stop()
        elif launch is not None:
            launch.terminate()

    # calls --------------------------------------------------------------------------------------------

    def _on_hello(self) -> dict[str, str]:
        return versions()

    def _on_start(self, place: WorldPlace, start_method: str) -> None:
        host_of_rank.set(place.host_of)
        with self._owning:
            if (launch := self._launch) is None:
                raise NbParallelError("the node of this host ends, or its ranks were started already")
            self._session = session = NodeSession(place, start_method, launch, self._on_event)
            self._launch = None
        session.start()

    def _on_put(self, first: bool, piece: bytes) -> None:
        """Take a piece of a task that is too large for one call."""
        if first:
            self._pieces.clear()  # of a task that was never sent whole
        self._pieces.append(piece)

    def _on_task(self, piece: bytes) -> None:
        """Begin a task, given its last piece; what it prints and how it ends are events."""
        task: HostTask = pickle.loads(b"".join([*self._pieces, piece]))
        self._pieces.clear()
        begun = threading.Event()
        job = self._perform, self._running, task, begun
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=job, name="nbparallel-task", daemon=True).start()
        if not begun.wait(BEGIN_SECONDS):
            raise NbParallelError("the ranks are busy with something else")

    def _on_lack(self, wanted: Sequence[ArrayHandle]) -> list[int]:
        return self._running.lack(wanted)

    def _on_take(self, start: int) -> bytes:
        """Return a piece of the last report, which was too large for an event."""
        return self._report[start : start + PIECE]

    def _on_interrupt(self, _number: int, times: int) -> None:
        for _ in range(times):
            self._running.interrupt()

    def _on_peer_failed(self, number: int, notice: FailureNotice) -> None:
        self._running.peer_failed(number, notice)

    def _on_ready(self) -> list[int]:
        """Start ranks again that have died; return which were since the last time."""
        return self._running.take_revived()

    def _on_rename(self, hosts: tuple[str, ...]) -> None:
        self._running.rename_hosts(hosts)

    def _on_restart(self, rank: int | None) -> None:
        self._running.restart(rank)

    def _on_view(self, what: str, *arguments: Any) -> Any:
        """Return what the session here shows of its ranks: its method `what` does."""
        return getattr(self._running, what)(*arguments)

    def _on_look(self, _number: int) -> None:
        """Show that this node and its connection work, by an event as output is."""
        send_message(self.port.emit, "here")

    # tasks --------------------------------------------------------------------------------------------

    @property
    def _running(self) -> NodeSession:
        if self._session is None:
            raise NbParallelError("the ranks of this host were not started")
        return self._session

    def _perform(self, session: NodeSession, task: HostTask, begun: threading.Event) -> None:
        output = NodeOutput(self.port, task.number)
        try:
            door = self._links.open(task.number, task.hosts, session.place.index) if task.hosts else None
            report = session.perform_task(task, output, begun.set, door)
        except BaseException as error:  # noqa: BLE001  whatever it is, the kernel waits for it
            report = HostReport(error=f"{type(error).__name__}: {error}")
        finally:
            output.close()
        self._links.end_task(well=not report.error and all(outcome.ok for outcome in report.outcomes))
        begun.set()
        self._report = pickle.dumps(report, 5)
        inline = self._report if len(self._report) <= INLINE else b""
        send_message(self.port.emit, "ended", task.number, len(self._report), inline)

    def _on_event(self, message: Any) -> None:
        if isinstance(message, RankDeath) and not self._ended:
            send_message(self.port.emit, "died", time.monotonic_ns())
        elif isinstance(message, Outcome) and not message.ok:
            host_of_rank.set(self._running.place.host_of)  # of this thread's messages
            notice = self._running.first_failure(message.number) or notice_of(message)
            send_message(self.port.emit, "failed", message.number, notice)
