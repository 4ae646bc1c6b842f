"""The supervisor's event loop: one poll over all its descriptors, and outboxes that never block."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from nbparallel.errors import ProtocolError
from nbparallel.wire import frames
from nbparallel.wire.frames import Frame
from nbparallel.wire.system import ready

LIMIT = 200_000
"""Frames that may wait for one peer; one that takes none of them is dropped."""


class Outbox:
    """Frames on their way to one peer.

    Owns duplicates of the descriptors that wait; the socket belongs to the caller.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self.broken = False
        """Whether the peer is gone or took nothing for too long."""

    def send(
        self, kind: int, payload: bytes = b"", fds: Sequence[int] = (), *, epoch: int = 0, sequence: int = 0
    ) -> None:
        """Send now, or keep the frame until `flush`; the caller keeps its descriptors."""
        if self.broken:
            return
        data = frames.encode(kind, payload, epoch=epoch, sequence=sequence)
        if not self._waiting and (self._try(data, fds) or self.broken):
            return
        if len(self._waiting) >= LIMIT:
            self._break()
            return
        self._waiting.append((data, [os.dup(fd) for fd in fds]))

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it."""
        while self._waiting:
            data, fds = self._waiting[0]
            if not self._try(data, fds):
                return
            self._waiting.popleft()
            _close(fds)

    @property
    def waiting(self) -> bool:
        """Whether frames wait for room."""
        return bool(self._waiting)

    def _try(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            if fds:
                socket.send_fds(self._socket, [data], list(fds))
            else:
                self._socket.send(data)
        except OSError as error:
            if not isinstance(error, BlockingIOError) and error.errno not in frames.PASSING:
                self._break()
            return False
        return True

    def _break(self) -> None:
        self.broken = True
        self.close()
        try:
            # It must not wait for frames that it will never get.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone

    def close(self) -> None:
        """Drop what waits."""
        while self._waiting:
            _close(self._waiting.popleft()[1])


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


LARGEST_PAYLOAD = 1 << 20
"""Bytes of the largest payload that a supervisor takes; the notebook's longest ``sys.path`` is far below."""
LINGER_SECONDS = 0.0003
"""During which nothing wakes the supervisor: messages that arrive within it are read together."""


class SupervisorEventLoop:
    """Handlers of descriptors that become readable, and frames that wait to be sent on sockets."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._full: set[int] = set()
        """Sockets that are watched for room."""
        self.linger = False
        """Whether other clients are about to send the kind of message read last, which needs no answer."""

    def add(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `fd` is readable or at its end."""
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def once(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler` when `fd` is readable, and not again: what is readable may stay so."""

        def call() -> None:
            self.drop(fd)
            handler()

        self.add(fd, call)

    def drop(self, fd: int) -> None:
        """Stop watching a descriptor, which stays open (idempotent)."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def close(self, fd: int) -> None:
        """Stop watching a descriptor and close it; -1 is none."""
        if fd >= 0:
            self.drop(fd)
            os.close(fd)

    def add_socket(self, sock: socket.socket, handler: Callable[[], object]) -> Outbox:
        """Watch a socket, which does not block from now on; return the outbox for it."""
        sock.setblocking(False)
        self.add(sock.fileno(), handler)
        box = self._outboxes[sock.fileno()] = Outbox(sock)
        return box

    def forget(self, sock: socket.socket) -> None:
        """Stop watching a socket and close it (idempotent)."""
        fd = sock.fileno()
        if fd < 0:
            return
        self.drop(fd)
        box = self._outboxes.pop(fd, None)
        if box is not None:
            box.close()
        self._full.discard(fd)  # the next socket may get its number
        sock.close()

    def wait(self, *, block: bool = True, seconds: float | None = None) -> None:
        """Wait for something to happen, as a rule without a time-out, and call the handlers; or poll only."""
        full = {fd for fd, box in self._outboxes.items() if box.waiting}
        for fd in self._full ^ full:
            if fd in self._outboxes:
                self._poll.modify(fd, select.POLLIN | (select.POLLOUT if fd in full else 0))
        self._full = full
        if block and self.linger:
            self.linger = False
            # Not with something there: a client that sends much would be read one frame at a time.
            if not ready(self._poll, 0):
                time.sleep(LINGER_SECONDS)
        for fd, events in ready(self._poll, _milliseconds(seconds) if block else 0):
            box_ready = self._outboxes.get(fd) if events & select.POLLOUT else None
            if box_ready is not None:
                box_ready.flush()
            handler = self._handlers.get(fd)
            if handler is not None and events & ~select.POLLOUT:
                handler()


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds + 1


def take(sock: socket.socket) -> Frame | bool | None:
    """Return a frame, None at the end of the stream, False when nothing is there."""
    try:
        return frames.receive(sock, largest=LARGEST_PAYLOAD)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) or error.errno in frames.PASSING else None


def take_or_end(sock: socket.socket) -> Frame | bool | None:
    """Do what `take` does, where damage is the end as well."""
    try:
        return take(sock)
    except ProtocolError:
        return None


def is_ready(fd: int, seconds: float = 0) -> bool:
    """Return whether a descriptor is readable within `seconds`: of a pidfd, whether its process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(ready(poll, seconds * 1000))


def readable(*socks: socket.socket) -> set[int]:
    """Return the descriptors of those sockets on which a frame, or the end, is there."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    return {fd for fd, _ in ready(poll, 0)}
