"""The process of a node, a child of what represents the cluster on its host, and the frames between the two.

In the process that the cluster watches, shared arrays would count as its own memory, and it would be killed
for them.  So the node is a child; every byte passes the other one in frames.  It ends with its parent.
"""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import IO

from nbparallel.cluster.contract import MOST_EVENT, ClusterNode, Link, load_node
from nbparallel.errors import ChannelClosedError, ProtocolError

HEADER = struct.Struct("<BQQ")
"""Kind, number of the call, bytes that follow."""
MOST_FRAME = 1 << 31
"""A larger frame is damage."""
_NAME, _COUNT, _SIZE = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nbparallel.cluster.node_process import main; main(*sys.argv[2:])"
)


class FrameKind(IntEnum):
    """What a frame between a node and its parent holds."""

    STARTED = 1
    """The node is there."""
    FAILED = 2
    """It could not be made; the text of the reason."""
    CALL = 3
    """An operation, and data."""
    REPLY = 4
    """What the node returned for the call of this number."""
    ERROR = 5
    """What it raised, as text."""
    EVENT = 6
    """For the session."""
    LINKED = 7
    """There is a link with a peer."""
    LINK = 8
    """A frame for, or of, a peer."""
    UNLINKED = 9
    """The link with a peer was closed."""


def named(name: str, data: bytes | memoryview = b"") -> bytes:
    """Return a name with data behind it."""
    text = name.encode()
    return b"".join((_NAME.pack(len(text)), text, data))


def split_name(payload: bytes) -> tuple[str, bytes]:
    """Return the name that begins a payload, and what follows."""
    (length,) = _NAME.unpack_from(payload)
    end = _NAME.size + length
    return payload[_NAME.size : end].decode(), payload[end:]


def start_process(host: str, spec: str) -> tuple[subprocess.Popen[bytes], socket.socket, IO[bytes]]:
    """Start a node's process; return it, the parent's end of the socket, and the file of its output."""
    import tempfile

    ours, theirs = socket.socketpair()
    log = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    try:
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        words = [sys.executable, "-c", _MAIN, path, str(theirs.fileno()), str(os.getpid()), host, spec]
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
        self.frames: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
        self._closed = False

    def send(self, *buffers: bytes | memoryview) -> None:
        # docstring inherited
        if self._closed:
            raise self._gone()
        sizes = b"".join(_SIZE.pack(memoryview(buffer).nbytes) for buffer in buffers)
        self._port.send(FrameKind.LINK, 0, named(self._peer), _COUNT.pack(len(buffers)), sizes, *buffers)

    def receive(self, timeout: float) -> tuple[bytes, ...]:
        # docstring inherited
        try:
            frame = self.frames.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no frame of host {self._peer} within {timeout:g} s") from None
        if frame is None:
            self.frames.put(None)
            raise self._gone()
        return frame

    def feed(self, payload: bytes) -> None:
        """Take a frame of the peer's."""
        (count,) = _COUNT.unpack_from(payload)
        sizes = [_SIZE.unpack_from(payload, _COUNT.size + n * _SIZE.size)[0] for n in range(count)]
        start, buffers = _COUNT.size + count * _SIZE.size, []
        for size in sizes:
            buffers.append(payload[start : start + size])
            start += size
        self.frames.put(tuple(buffers))

    def close(self) -> None:
        # docstring inherited
        if not self._closed:
            self._port.send(FrameKind.UNLINKED, 0, named(self._peer))
            self.end()

    def end(self) -> None:
        """Take the close of the peer's."""
        self._closed = True
        self.frames.put(None)

    def _gone(self) -> ChannelClosedError:
        return ChannelClosedError(f"the link with host {self._peer} is closed")


class ProcessPort:
    """The port of a node in a process of its own: a socket to the parent."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self.host, self._socket = host, sock
        self._lock = threading.Lock()
        self._links: dict[str, _ProcessLink] = {}

    def send(self, kind: FrameKind, number: int, *parts: bytes | memoryview) -> None:
        """Send one frame."""
        size = sum(memoryview(part).nbytes for part in parts)
        with self._lock:
            try:
                for part in (HEADER.pack(kind, number, size), *parts):
                    self._socket.sendall(part)
            except OSError as error:
                raise ChannelClosedError(f"the cluster's process on this host is gone: {error}") from error

    def emit(self, data: bytes) -> None:
        # docstring inherited
        if len(data) > MOST_EVENT:
            raise ValueError(f"an event has at most {MOST_EVENT} bytes, not {len(data)}")
        self.send(FrameKind.EVENT, 0, data)

    def link(self, peer: str) -> Link:
        # docstring inherited
        return self._links[peer]

    def serve(self, node: ClusterNode) -> None:
        """Handle the parent's frames until it is gone."""
        while (header := self._receive(HEADER.size)) is not None:
            kind, number, size = HEADER.unpack(header)
            if size > MOST_FRAME:
                raise ProtocolError(f"a frame of {size} bytes")
            payload = self._receive(size) if size else b""
            if payload is None:
                return
            if kind == FrameKind.CALL:
                job = (node, number, *split_name(payload))
                threading.Thread(target=self._handle, args=job, name="nbparallel-call", daemon=True).start()
            elif kind == FrameKind.LINKED:
                peer, _ = split_name(payload)
                self._links[peer] = _ProcessLink(peer, self)
                self.send(FrameKind.REPLY, number)
            elif kind == FrameKind.LINK:
                peer, frame = split_name(payload)
                self._links[peer].feed(frame)
            elif kind == FrameKind.UNLINKED:
                self._links[split_name(payload)[0]].end()

    def _handle(self, node: ClusterNode, number: int, op: str, data: bytes) -> None:
        try:
            reply = node.handle(op, data)
        except Exception as error:  # noqa: BLE001  whatever it is, the caller reads it
            self.send(FrameKind.ERROR, number, f"{type(error).__name__}: {error}".encode(errors="replace"))
        else:
            self.send(FrameKind.REPLY, number, reply)

    def _receive(self, size: int) -> bytes | None:
        """Return so many bytes; None if the parent is gone."""
        data, at = bytearray(size), 0
        while at < size:
            try:
                count = self._socket.recv_into(memoryview(data)[at:])
            except OSError:
                return None
            if not count:
                return None
            at += count
        return bytes(data)


def main(fd: str, parent: str, host: str, spec: str) -> None:
    """Be a node until the parent closes the socket, or ends."""
    with socket.socket(fileno=int(fd)) as sock:
        port = ProcessPort(sock, host)
        try:
            node = load_node(spec)(port)
        except BaseException as error:  # noqa: BLE001  the parent reports it
            port.send(FrameKind.FAILED, 0, f"{type(error).__name__}: {error}".encode())
            return
        ended = threading.Lock()

        def end() -> None:
            if ended.acquire(blocking=False):
                node.end()
                os._exit(0)

        _watch(int(parent), end)
        port.send(FrameKind.STARTED, 0)
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
