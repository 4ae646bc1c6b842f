"""Watch: one poll over everything that the supervisor listens to."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.outbox import Outbox
from nbparallel.wire import frames
from nbparallel.wire.frames import Frame
from nbparallel.wire.system import ready

LARGEST_PAYLOAD = 1 << 20
"""Bytes of the largest payload that a supervisor takes; the notebook's longest ``sys.path`` is far below."""
LINGER_SECONDS = 0.0003
"""In which nothing wakes the supervisor, so that what comes meanwhile is heard at once."""


class Watch:
    """Descriptors with what to do when something is there, and sockets with what waits to be sent."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._full: set[int] = set()
        """Sockets that are watched for room."""
        self.linger = False
        """Whether others are about to say what was heard last, which needs no answer: each would wake us."""

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
        """Stop watching a descriptor, which stays open; again is fine."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def close(self, fd: int) -> None:
        """Stop watching a descriptor and close it; -1 is none."""
        if fd >= 0:
            self.drop(fd)
            os.close(fd)

    def add_socket(self, sock: socket.socket, handler: Callable[[], object]) -> Outbox:
        """Watch a socket, which does not block from now on; return where to put what it shall get."""
        sock.setblocking(False)
        self.add(sock.fileno(), handler)
        box = self._outboxes[sock.fileno()] = Outbox(sock)
        return box

    def forget(self, sock: socket.socket) -> None:
        """Stop watching a socket and close it; again is fine."""
        fd = sock.fileno()
        if fd < 0:
            return
        self.drop(fd)
        box = self._outboxes.pop(fd, None)
        if box is not None:
            box.close()
        self._full.discard(fd)  # the next socket may get its number
        sock.close()

    def wait(self, *, block: bool = True) -> None:
        """Wait for something to happen, without a time-out, and call the handlers; or only look."""
        full = {fd for fd, box in self._outboxes.items() if box.waiting}
        for fd in self._full ^ full:
            if fd in self._outboxes:
                self._poll.modify(fd, select.POLLIN | (select.POLLOUT if fd in full else 0))
        self._full = full
        if block and self.linger:
            self.linger = False
            # Not with something there: who says much would be heard one frame at a time.
            if not ready(self._poll, 0):
                time.sleep(LINGER_SECONDS)
        for fd, events in ready(self._poll, None if block else 0):
            box_ready = self._outboxes.get(fd) if events & select.POLLOUT else None
            if box_ready is not None:
                box_ready.flush()
            handler = self._handlers.get(fd)
            if handler is not None and events & ~select.POLLOUT:
                handler()


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


def readable(*socks: socket.socket) -> set[int]:
    """Return the descriptors of those sockets on which a frame, or the end, is there."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    return {fd for fd, _ in ready(poll, 0)}
