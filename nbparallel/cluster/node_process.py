"""The process of a node, a child of its host's worker, with which it ends.

In the worker's process shared arrays would count as its memory, and its nanny would kill it for them.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

from nbparallel.cluster.node_port import NodePort
from nbparallel.wire.system import roomy_pair, without_debugger

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
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        end()

    threading.Thread(target=wait, name="nbparallel-parent", daemon=True).start()
