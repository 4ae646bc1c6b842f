"""The process of a node, a child of what represents the cluster on its host, and the frames between the two.

In the process that the cluster watches, shared arrays would count as its own memory, and it would be killed
for them.  So the node is a child; every byte passes the other one in frames.  It ends with its parent.

Each frame has a head in JSON and content.  ``kind`` of the head is, from the node: ``started``, ``failed``
(the content says why), ``reply`` or ``error`` to the call ``number``, ``event``; to it: ``call``, ``linked``
(there is a link with the host ``name``); both ways: ``link`` (buffers of ``sizes`` for or of that host) and
``unlinked``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import IO, Any

from nbparallel.cluster.contract import MOST_EVENT, ClusterNode, Link, NodePort, load_node
from nbparallel.errors import ChannelClosedError
from nbparallel.wire.system import roomy_pair, send_all, without_debugger

NODE = "nbparallel.cluster.node_process:start_node"
"""What an adapter is asked to start."""
SIZES = struct.Struct("<IQ")
"""Begins a frame: bytes of head and content."""
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nbparallel.cluster.node_process import main; main(*sys.argv[2:])"
)


def pack_head(nbytes: int, kind: str, **what: Any) -> bytes:
    """Return the begin of a frame with so many bytes of content."""
    head = json.dumps({"kind": kind, **what}).encode()
    return SIZES.pack(len(head), nbytes) + head


def start_process(host: str, spec: str) -> tuple[subprocess.Popen[bytes], socket.socket, IO[bytes]]:
    """Start a node's process; return it, the parent's end of the socket, and the file of its output."""
    ours, theirs = roomy_pair()
    log = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    try:
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        words = [sys.executable, "-c", _MAIN, path, str(theirs.fileno()), str(os.getpid()), host, spec]
        with without_debugger():
            process = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
    except BaseException:
        ours.close()
        log.close()
        raise
    finally:
        theirs.close()
    return process, ours, log


def last_lines(log: IO[bytes], most: int = 2000) -> str:
    """Return the end of what a node's process has printed."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - most))
    return log.read().decode(errors="replace").strip()


class _ProcessLink:
    """One end of a link, whose frames pass the parent."""

    def __init__(self, peer: str, port: ProcessPort) -> None:
        self._peer, self._port = peer, port
        self._frames: queue.SimpleQueue[tuple[memoryview, ...] | None] = queue.SimpleQueue()
        self._closed = False

    def send(self, *buffers: bytes | memoryview) -> None:
        # docstring inherited
        if self._closed:
            raise self._gone()
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        self._port.send("link", *buffers, name=self._peer, sizes=sizes)

    def receive(self, timeout: float) -> tuple[memoryview, ...]:
        # docstring inherited
        try:
            frame = self._frames.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no frame of host {self._peer} within {timeout:g} s") from None
        if frame is None:
            self._frames.put(None)
            raise self._gone()
        return frame

    def feed(self, content: bytes, sizes: Sequence[int]) -> None:
        """Take a frame of the peer's."""
        ends = zip(accumulate(sizes), sizes, strict=True)
        whole = memoryview(content)
        self._frames.put(tuple(whole[end - size : end] for end, size in ends))

    def close(self) -> None:
        # docstring inherited
        if not self._closed:
            self._port.send("unlinked", name=self._peer)
            self.end()

    def end(self) -> None:
        """Take the close of the peer's."""
        self._closed = True
        self._frames.put(None)

    def _gone(self) -> ChannelClosedError:
        return ChannelClosedError(f"the link with host {self._peer} is closed")


class ProcessPort:
    """The port of a node in a process of its own: a socket to the parent."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self.host, self._socket = host, sock
        self._lock = threading.Lock()
        self._links: dict[str, _ProcessLink] = {}

    def send(self, kind: str, *parts: bytes | memoryview, **what: Any) -> None:
        """Send one frame."""
        head = pack_head(sum(memoryview(part).nbytes for part in parts), kind, **what)
        with self._lock:
            try:
                send_all(self._socket, head, *parts)
            except OSError as error:
                raise ChannelClosedError(f"the cluster's process on this host is gone: {error}") from error

    def emit(self, data: bytes) -> None:
        # docstring inherited
        if len(data) > MOST_EVENT:
            raise ValueError(f"an event has at most {MOST_EVENT} bytes, not {len(data)}")
        self.send("event", data)

    def link(self, peer: str) -> Link:
        # docstring inherited
        return self._links[peer]

    def serve(self, node: ClusterNode) -> None:
        """Handle the parent's frames until it is gone."""
        with contextlib.suppress(OSError), self._socket.makefile("rb") as file:
            while len(sizes := file.read(SIZES.size)) == SIZES.size:
                length, nbytes = SIZES.unpack(sizes)
                head, content = file.read(length), file.read(nbytes)
                if len(content) == nbytes:
                    self._take(node, content, **json.loads(head))

    def _take(
        self, node: ClusterNode, content: bytes, kind: str, name: str, number: int = 0,
        sizes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        if kind == "call":
            job = node, number, name, content
            threading.Thread(target=self._handle, args=job, name="nbparallel-call", daemon=True).start()
        elif kind == "linked":
            former, self._links[name] = self._links.get(name), _ProcessLink(name, self)
            if former is not None:
                former.end()
            self.send("reply", number=number)
        elif kind == "link":
            self._links[name].feed(content, sizes)
        else:
            self._links[name].end()

    def _handle(self, node: ClusterNode, number: int, op: str, data: bytes) -> None:
        try:
            reply = node.handle(op, data)
        except Exception as error:  # noqa: BLE001  whatever it is, the caller reads it
            text = f"{type(error).__name__}: {error}".encode(errors="replace")
            self.send("error", text, number=number)
        else:
            self.send("reply", reply, number=number)


def start_node(port: NodePort) -> ClusterNode:
    """Return the node of a host; what it needs is imported while the template of its ranks starts."""
    from nbparallel.session.processes.launch import SupervisorLaunch

    launch = SupervisorLaunch()
    make: Any = load_node("nbparallel.cluster.node:Node")
    node: ClusterNode = make(port, launch)
    return node


def main(fd: str, parent: str, host: str, spec: str) -> None:
    """Be a node until the parent closes the socket, or ends."""
    with socket.socket(fileno=int(fd)) as sock:
        port = ProcessPort(sock, host)
        try:
            node = load_node(spec)(port)
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
        port.serve(node)
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
