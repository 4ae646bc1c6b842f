"""Node: what runs on each host of a session, and performs there what the kernel asks for."""

from __future__ import annotations

import contextlib
import contextvars
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nbparallel.cluster.contract import Link, NodePort
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
from nbparallel.cluster.node_session import NodeSession
from nbparallel.errors import ChannelClosedError, NbParallelError, host_of_rank
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.session.processes.rank_death import RankDeath
from nbparallel.wire.control import ControlView
from nbparallel.wire.frames import DOOR_HEAD, DoorKind, Octets
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.messages import Display, Outcome
from nbparallel.wire.system import roomy_pair, send_all

# Output of a host's ranks on its way to the notebook: folded, so that events are few.

FOLD_SECONDS = 0.01
"""How long text waits for more of it after an event; the first after a pause does not wait."""
FOLDED = 12 << 10
"""Characters that are sent without waiting any longer."""
NOTE = "note"


class NodeOutput(TaskOutput):
    """The output of one task, which is sent as events of ``(rank, kind, text or Display)``.

    Its thread ends with `close`; what comes later is sent immediately.
    """

    def __init__(self, port: NodePort, number: int) -> None:
        super().__init__(number, None)
        self._port = port
        self._items: list[tuple[int, str, Any]] = []
        self._characters = 0
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._send_folded, name="nbparallel-output", daemon=True).start()

    # docstrings inherited

    def stream(self, rank: int, name: str, text: str) -> None:
        self._add(rank, name, text, len(text))

    def display(self, rank: int, message: Display) -> None:
        self._add(rank, message.kind, message, FOLDED)

    def note(self, text: str) -> None:
        self._add(-1, NOTE, text, len(text))

    def _add(self, rank: int, kind: str, what: Any, characters: int) -> None:
        with self._changed:
            if isinstance(what, str) and kind != NOTE and self._items and self._items[-1][:2] == (rank, kind):
                what = self._items.pop()[2] + what
            self._items.append((rank, kind, what))
            self._characters += characters
            if self._closed or self._characters >= FOLDED:
                self._flush()
            else:
                self._changed.notify()

    def _flush(self) -> None:
        """Send what there is, in order; the lock is held."""
        if self._items:
            items, self._items, self._characters = self._items, [], 0
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


# Links of a node: frames of operations over hosts, between the leader of its ranks and the other nodes.
#
# A task that may call such operations has a *door*: a socketpair, one end of which travels with the task to
# the ranks.  What comes for a task that this host has not begun waits where it is; what comes for one that
# has ended is dropped.

LINKED = struct.Struct("<QHQ")
"""Begins a frame between nodes: the task, a `DoorKind`, the number of the exchange."""
LOOK_SECONDS = 60.0
"""Longest wait for a frame, or for a task to begin, between two looks whether it still makes sense."""
DRAIN_SECONDS, FAILED_SECONDS = 2.0, 0.1
"""How long the last frames of a task may take to leave; after a failure, no host counts on them."""


class NodeDoor:
    """The node's end of the door of one task; what a task has that is watched."""

    look_seconds: float = LOOK_SECONDS

    def __init__(self, number: int, links: Mapping[int, Link]) -> None:
        self._number, self._links = number, links
        self._mine, self._theirs = roomy_pair()
        self.fds: tuple[int, ...] = (self._theirs.fileno(),)
        """They travel with the task."""
        self._writing = threading.Lock()
        self._serving = threading.Thread(target=self._serve, name=f"nbparallel-door-{number}", daemon=True)
        self._serving.start()

    def look(self, control: ControlView) -> None:
        """Do nothing: threads carry the frames."""

    def place(self, control: ControlView, rank: int) -> str:
        """Return nothing: ranks of a cell are at no item."""
        return ""

    def deliver(self, host: int, kind: int, number: int = 0, payload: Octets = b"") -> None:
        """Pass a frame of another host's on to the leader; drop it if the task has ended."""
        with self._writing, contextlib.suppress(OSError):
            send_all(self._mine, DOOR_HEAD.pack(host, kind, len(payload), number), payload)

    def _serve(self) -> None:
        """Pass on the leader's frames, until the last."""
        while header := self._receive(DOOR_HEAD.size):
            host, kind, length, number = DOOR_HEAD.unpack(header)
            if kind == DoorKind.LAST:
                return
            if len(payload := self._receive(length)) < length:
                return
            try:
                self._links[host].send(LINKED.pack(self._number, kind, number), payload)
            except ChannelClosedError:
                self.deliver(host, DoorKind.CLOSED)

    def _receive(self, size: int) -> memoryview:
        """Return so many bytes; none if the door is closed."""
        data, at = memoryview(bytearray(size)), 0
        while at < size:
            try:
                count = self._mine.recv_into(data[at:])
            except OSError:
                count = 0
            if not count:
                return data[:0]
            at += count
        return data

    def close(self, *, well: bool) -> None:
        """Notify the other hosts that no frame of this one follows in this task."""
        with contextlib.suppress(OSError):
            self._theirs.send(DOOR_HEAD.pack(0, DoorKind.LAST, 0, 0))
            self._serving.join(DRAIN_SECONDS if well else FAILED_SECONDS)
        with contextlib.suppress(OSError):
            self._mine.shutdown(socket.SHUT_RDWR)  # a thread that sends or receives here goes on
        self._serving.join(DRAIN_SECONDS)
        for link in self._links.values():
            with contextlib.suppress(ChannelClosedError):
                link.send(LINKED.pack(self._number, DoorKind.ENDED if well else DoorKind.FAILED, 0), b"")
        self._mine.close()
        self._theirs.close()


class NodeLinks:
    """The links of one node.

    Parameters
    ----------
    on_closed : callable
        Called, in any thread, with the name of a host to which there is no link any more, and the number of
        a task that had this link.
    """

    def __init__(self, port: NodePort, on_closed: Callable[[str, int], None]) -> None:
        self._port, self._on_closed = port, on_closed
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._gone: set[int] = set()
        """Hosts whose link is closed."""
        self._number = 0
        """Of the last task that had a door."""
        self._door: NodeDoor | None = None
        self._closed = False

    def open(self, number: int, hosts: Sequence[str], index: int) -> NodeDoor:
        """Return the door of a task on all of `hosts`, of which this one has an `index`."""
        others = {i: name for i, name in enumerate(hosts) if i != index}
        links = {i: self._port.link(name) for i, name in others.items()}
        fresh = {i: link for i, link in links.items() if link is not self._links.get(i)}
        with self._changed:
            self._links.update(fresh)
            self._gone -= fresh.keys()
            door = self._door = NodeDoor(number, dict(self._links))
            self._number = number
            gone = list(self._gone)
            self._changed.notify_all()
        for i in gone:
            door.deliver(i, DoorKind.CLOSED)
            self._on_closed(others[i], number)  # the kernel would have connected it again if it knew
        for i, link in fresh.items():
            threading.Thread(
                target=self._read,
                args=(i, others[i], link, number),
                name=f"nbparallel-link-{others[i]}",
                daemon=True,
            ).start()
        return door

    def end_task(self, *, well: bool) -> None:
        """Close the door, if there is one."""
        with self._changed:
            door, self._door = self._door, None
        if door is not None:
            door.close(well=well)

    def close(self) -> None:
        """Let threads end (idempotent)."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _read(self, host: int, name: str, link: Link, first: int) -> None:
        """Pass on what comes from another host, until its link is closed."""
        with contextlib.suppress(ChannelClosedError):
            while not self._closed:
                with contextlib.suppress(TimeoutError):
                    frame = link.receive(LOOK_SECONDS)
                    try:
                        header, payload = frame
                        task, kind, number = LINKED.unpack(header)
                    except (ValueError, struct.error):
                        link.close()  # what is damaged is the end of a connection, for both hosts
                        continue
                    if (door := self._door_of(task)) is not None:
                        door.deliver(host, kind, number, payload)
        with self._changed:
            if self._closed or self._links.get(host) is not link:
                return
            self._gone.add(host)
            door = self._door
        if door is not None:
            door.deliver(host, DoorKind.CLOSED)
        self._on_closed(name, first)

    def _door_of(self, task: int) -> NodeDoor | None:
        """Return the door of a task, once it has begun; None if it has ended."""
        with self._changed:
            while self._number < task and not self._closed:
                self._changed.wait(LOOK_SECONDS)
            return self._door if self._number == task else None


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
