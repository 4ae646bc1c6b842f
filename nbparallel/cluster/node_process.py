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
import traceback
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
    (ours, theirs), (doors, their_doors) = roomy_pair(), socket.socketpair(type=socket.SOCK_SEQPACKET)
    log = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    fds = [theirs.fileno(), their_doors.fileno()]
    words = [sys.executable, "-c", PROGRAM, path, *map(str, fds), str(os.getpid()), host]
    try:
        with theirs, their_doors, without_debugger():
            process = subprocess.Popen(
                words, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
    except BaseException:
        for resource in (ours, doors, log):
            resource.close()
        raise
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
            port.send("error", text_of(error))
            return
        try:
            _end_with(int(parent), sock)
            port.send("reply")
            port.serve(node.handle)
        except BaseException:
            traceback.print_exc()  # the parent shows the end of it
            raise
        finally:
            try:
                node.stop()
            finally:
                os._exit(int(sys.exc_info()[0] is not None))


def _end_with(parent: int, sock: socket.socket) -> None:
    """Close a socket when the parent's process has ended: what it has forked may have the other end."""
    pidfd = os.pidfd_open(parent)

    def wait() -> None:
        if os.getppid() == parent:
            is_ready(pidfd, None)
        sock.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=wait, name="nbparallel-parent", daemon=True).start()


# Port: the way of a node to the worker of its host, over a socket that carries frames.
#
# Each frame has a head and content.  From the node it is an ``event``, or ``reply`` or ``error`` to the call
# of that number: 0, which no call has, is its start.  To the node it is a call of that name.  Over a second
# socket the node passes the doors of tasks.

HEAD = struct.Struct("<16sIQ")
"""Begins a frame: what it is, in 16 bytes, the number of the call, bytes of content."""


def unpack_head(head: bytes | bytearray) -> tuple[str, int, int]:
    """Return what a head says."""
    word, number, nbytes = HEAD.unpack(head)
    return word.rstrip(b"\0").decode(), number, nbytes


def text_of(error: BaseException) -> bytes:
    """Return an error as it travels to the worker."""
    return f"{type(error).__name__}: {error}".encode(errors="replace")


class NodePort:
    """The way of a node to its host's worker, and with it to the kernel and the other hosts."""

    def __init__(self, sock: socket.socket, doors: socket.socket, host: str) -> None:
        self.host, self._socket, self._doors = host, sock, doors
        self._lock = threading.Lock()

    def send(self, kind: str, content: bytes = b"", number: int = 0) -> None:
        """Send one frame."""
        with self._lock:
            try:
                send_all(self._socket, HEAD.pack(kind.encode(), number, len(content)), content)
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
            while len(head := file.read(HEAD.size)) == HEAD.size:
                op, number, nbytes = unpack_head(head)
                content = file.read(nbytes)
                if len(content) == nbytes:
                    job = handle, number, op, content
                    name = "nbparallel-call"
                    threading.Thread(target=self._answer, args=job, name=name, daemon=True).start()

    def _answer(self, handle: Callable[[str, bytes], bytes], number: int, op: str, data: bytes) -> None:
        try:
            kind, reply = "reply", handle(op, data)
        except Exception as error:  # noqa: BLE001  whatever it is, the caller reads it
            kind, reply = "error", text_of(error)
        self.send(kind, reply, number)
