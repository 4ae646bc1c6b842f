"""Links of a node: frames of operations over hosts, between the leader of its ranks and the other nodes.

A task that may call such operations has a *door*: a socketpair, one end of which travels with the task to
the ranks.  What comes for a task that this host has not begun waits where it is; what comes for one that has
ended is dropped.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

from nbparallel.cluster.contract import Link, NodePort
from nbparallel.errors import ChannelClosedError
from nbparallel.wire.control import ControlView
from nbparallel.wire.frames import DOOR_HEAD, DoorKind, Octets
from nbparallel.wire.system import roomy_pair, send_all

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
