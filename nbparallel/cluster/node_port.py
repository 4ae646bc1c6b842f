"""Port: the way of a node to the worker of its host, over a socket that carries frames.

Each frame has a head in JSON and content.  ``kind`` of the head is, from the node: ``started``, ``failed``
(the content says why), ``reply`` or ``error`` to the call ``number``, ``event``; to it: the call ``name``.
Over a second socket the node passes the doors of tasks.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nbparallel.errors import ChannelClosedError
from nbparallel.wire.system import send_all

SIZES = struct.Struct("<IQ")
"""Begins a frame: bytes of head and content."""


def pack_head(nbytes: int, kind: str, **what: Any) -> bytes:
    """Return the begin of a frame with so many bytes of content."""
    head = json.dumps({"kind": kind, **what}).encode()
    return SIZES.pack(len(head), nbytes) + head


class NodePort:
    """The way of a node to its host's worker, and with it to the kernel and the other hosts."""

    def __init__(self, sock: socket.socket, doors: socket.socket, host: str) -> None:
        self.host, self._socket, self._doors = host, sock, doors
        self._lock = threading.Lock()

    def send(self, kind: str, content: bytes = b"", **what: Any) -> None:
        """Send one frame."""
        with self._lock:
            try:
                send_all(self._socket, pack_head(len(content), kind, **what), content)
            except OSError as error:
                raise ChannelClosedError(f"the cluster's process on this host is gone: {error}") from error

    def emit(self, data: bytes) -> None:
        """Send an event to the kernel, in order."""
        self.send("event", data)

    def open_door(self, task: int, hosts: Sequence[str], door: socket.socket) -> None:
        """Have frames of a task carried to and from these hosts; the door stays the caller's."""
        socket.send_fds(self._doors, [json.dumps([task, hosts]).encode()], [door.fileno()])

    def serve(self, handle: Callable[[str, bytes], bytes]) -> None:
        """Have calls handled, each in a thread of its own, until the parent is gone."""
        with contextlib.suppress(OSError), self._socket.makefile("rb") as file:
            while len(sizes := file.read(SIZES.size)) == SIZES.size:
                length, nbytes = SIZES.unpack(sizes)
                head, content = json.loads(file.read(length)), file.read(nbytes)
                if len(content) == nbytes:
                    job = handle, head["number"], head["name"], content
                    name = "nbparallel-call"
                    threading.Thread(target=self._answer, args=job, name=name, daemon=True).start()

    def _answer(self, handle: Callable[[str, bytes], bytes], number: int, op: str, data: bytes) -> None:
        try:
            reply = handle(op, data)
        except Exception as error:  # noqa: BLE001  whatever it is, the caller reads it
            text = f"{type(error).__name__}: {error}".encode(errors="replace")
            self.send("error", text, number=number)
        else:
            self.send("reply", reply, number=number)
