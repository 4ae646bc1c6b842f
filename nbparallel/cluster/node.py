"""Node: what runs on each host of a session, and performs there what the kernel asks for."""

from __future__ import annotations

import contextlib
import contextvars
import pickle
import threading
import time
from functools import partial
from typing import Any

from nbparallel.cluster.host_mail import HostMail
from nbparallel.cluster.host_messages import (
    INLINE,
    HostReport,
    HostTask,
    notice_of,
    send_message,
    versions,
)
from nbparallel.cluster.host_place import HostPlace
from nbparallel.cluster.node_port import NodePort
from nbparallel.cluster.node_session import NodeSession
from nbparallel.errors import NbParallelError, label_of_rank
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.session.processes.rank_handle import RankDeath
from nbparallel.wire.messages import Display, Outcome

# Output of a host's ranks on its way to the notebook: folded, so that events are few.

FOLD_SECONDS = 0.01
"""How long text waits for more of it after an event; the first after a pause does not wait."""
NOTE = "note"


class NodeOutput(TaskOutput):
    """The output of one task, which is sent as events of ``(rank, kind, text or Display)``.

    Its thread ends with `close`; what comes later is sent immediately.
    """

    def __init__(self, port: NodePort, number: int) -> None:
        super().__init__(number, None)
        self._port = port
        self._items: list[tuple[int, str, Any]] = []
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._send_folded, name="nbparallel-output", daemon=True).start()

    # docstrings inherited

    def stream(self, rank: int, name: str, text: str) -> None:
        self._add(rank, name, text)

    def display(self, rank: int, message: Display) -> None:
        self._add(rank, message.kind, message)

    def note(self, text: str) -> None:
        self._add(-1, NOTE, text)

    def _add(self, rank: int, kind: str, what: Any) -> None:
        with self._changed:
            if isinstance(what, str) and kind != NOTE and self._items and self._items[-1][:2] == (rank, kind):
                what = self._items.pop()[2] + what
            self._items.append((rank, kind, what))
            if self._closed:
                self._flush()
            else:
                self._changed.notify()

    def _flush(self) -> None:
        """Send what there is, in order; the lock is held."""
        if self._items:
            items, self._items = self._items, []
            send_message(self._port.emit, "output", self.number, items)

    def _send_folded(self) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._items or self._closed)
                self._flush()
                self._changed.wait_for(lambda: self._closed, FOLD_SECONDS)

    def close(self) -> None:
        """Send what there is (idempotent)."""
        with self._changed:
            self._closed = True
            self._flush()
            self._changed.notify()


BEGIN_SECONDS = 5.0
"""How long a task may take to get hold of the ranks; another one has them only by mistake."""


class Node:
    """A host's ranks, for the kernel; data and reply of its calls are pickled.

    A call is a method here, or one of the session of the ranks, also what a user calls of it.

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
        self._report = b""
        self._ended = False

    def handle(self, op: str, data: bytes) -> bytes:
        """Handle a call of the kernel."""
        if self._session is not None:
            label_of_rank.set(self._session.place.label_of)  # each call has a thread, and its context
        if op == "fill":  # the piece stands behind what was pickled
            number, start, size = pickle.loads(data)
            self._running.arrays.fill(number, start, memoryview(data)[-size:])
            return pickle.dumps(None)
        call = getattr(self, f"_on_{op}", None) or getattr(self._running, op)
        return pickle.dumps(call(*pickle.loads(data)), 5)

    def end(self) -> None:
        """End every rank (idempotent)."""
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

    def _on_start(self, place: HostPlace, start_method: str) -> None:
        label_of_rank.set(place.label_of)
        with self._owning:
            if (launch := self._launch) is None:
                raise NbParallelError("the node of this host ends, or its ranks were started already")
            self._session = session = NodeSession(place, start_method, launch, self._on_event)
            self._launch = None
        session.start()

    def _on_task(self, task: HostTask) -> None:
        """Begin a task; what it prints and how it ends are events."""
        begun = threading.Event()
        job = self._perform, self._running, task, begun
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=job, name="nbparallel-task", daemon=True).start()
        if not begun.wait(BEGIN_SECONDS):
            raise NbParallelError("the ranks are busy with something else")

    def _on_take(self) -> bytes:
        """Return the last report, which was too large for an event."""
        return self._report

    def _on_look(self) -> None:
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
        with contextlib.ExitStack() as stack:
            try:
                mail = None
                if task.hosts:
                    mail = HostMail(session.place, partial(self.port.open_door, task.number, task.hosts))
                    stack.enter_context(contextlib.closing(mail))
                report = session.perform_task(task, output, begun.set, mail)
            except BaseException as error:  # noqa: BLE001  whatever it is, the kernel waits for it
                report = HostReport(error=f"{type(error).__name__}: {error}")
            finally:
                output.close()
        begun.set()
        self._report = pickle.dumps(report, 5)
        inline = self._report if len(self._report) <= INLINE else b""
        send_message(self.port.emit, "ended", task.number, inline)

    def _on_event(self, message: Any) -> None:
        if isinstance(message, RankDeath) and not self._ended:
            send_message(self.port.emit, "died", time.monotonic_ns())
        elif isinstance(message, Outcome) and not message.ok:
            label_of_rank.set(self._running.place.label_of)  # of this thread's messages
            notice = self._running.first_failure(message.number) or notice_of(message)
            send_message(self.port.emit, "failed", message.number, notice)
