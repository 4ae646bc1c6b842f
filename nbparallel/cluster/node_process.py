"""The process of a node, a child of its host's worker, with which it ends.

In the worker's process shared arrays would count as its memory, and its nanny would kill it for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from nbparallel.errors import ChannelClosedError
from nbparallel.wire.system import is_ready, roomy_pair, send_all, without_debugger

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nbparallel.cluster.node_process import main; main(*sys.argv[2:])"
)


def start_process(host: str) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket, IO[bytes]]:
    """Start a node's process; return it, the parent's ends of both sockets, and the file of its output."""
    pairs = roomy_pair(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (ours, theirs), (doors, their_doors) = pairs
    log = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    try:
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        fds = [theirs.fileno(), their_doors.fileno()]
        words = [sys.executable, "-c", PROGRAM, path, *map(str, fds), str(os.getpid()), host]
        with without_debugger():
            process = subprocess.Popen(
                words, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
    except BaseException:
        for resource in (ours, doors, log):
            resource.close()
        raise
    finally:
        theirs.close()
        their_doors.close()
    return process, ours, doors, log


def last_lines(log: IO[bytes], most: int = 2000) -> str:
    """Return the end of what a node's process has printed."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - most))
    return log.read().decode(errors="replace").strip()


def start_node(port: Any) -> Any:
    """Return the node of a host; what it needs is imported while the template of its ranks starts."""
    from nbparallel.session.processes.launch import SupervisorLaunch

    launch = SupervisorLaunch()
    from nbparallel.cluster.node import Node

    return Node(port, launch)


def main(fd: str, doors: str, parent: str, host: str) -> None:
    """Be a node until the parent closes the socket, or ends."""
    with socket.socket(fileno=int(fd)) as sock, socket.socket(fileno=int(doors)) as doors_socket:
        port = NodePort(sock, doors_socket, host)
        try:
            node = start_node(port)
        except BaseException as error:  # noqa: BLE001  the parent reports it
            port.send("failed", f"{type(error).__name__}: {error}".encode(errors="replace"))
            return
        ended = threading.Lock()

        def end() -> None:
            if ended.acquire(blocking=False):
                try:
                    node.end()
                finally:
                    os._exit(0)

        _watch(int(parent), end)
        port.send("started")
        port.serve(node.handle)
        end()
        threading.Event().wait()  # the other thread is ending the process


def _watch(parent: int, end: Callable[[], None]) -> None:
    """Call `end` when the parent's process has ended, in a thread."""
    pidfd = os.pidfd_open(parent)
    if os.getppid() != parent:
        end()

    def wait() -> None:
        is_ready(pidfd, None)
        end()

    threading.Thread(target=wait, name="nbparallel-parent", daemon=True).start()


# Port: the way of a node to the worker of its host, over a socket that carries frames.
#
# Each frame has a head in JSON and content.  ``kind`` of the head is, from the node: ``started``, ``failed``
# (the content says why), ``reply`` or ``error`` to the call ``number``, ``event``; to it: the call ``name``.
# Over a second socket the node passes the doors of tasks.

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
