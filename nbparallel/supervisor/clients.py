"""Clients: the processes that a supervisor serves, whichever program started them.

There is one kind of connection: a socket that is read frame by frame, an outbox, and a *kind* that acts on
what is special: `main` (kernel and ranks), `worlds` (processes that clients have started, or that form a
world), `external_world` (one that another program started).  What is about segments goes to the ledger from
all of them alike.  A client that breaks the protocol is its kind's to judge: a rank is killed, another's
program is disconnected.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.ledger.segment_server import Reply, SegmentServer
from nbparallel.wire import frames
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.system import is_ready as is_ready, ready

# The supervisor's event loop: one poll over all its descriptors, and outboxes that never block.

LIMIT = 200_000
"""Frames that may wait for one peer; one that takes none of them is dropped."""


class Outbox:
    """Frames on their way to one peer.

    Owns duplicates of the descriptors that wait; the socket belongs to the caller.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.waiting: deque[tuple[bytes, list[int]]] = deque()
        """What there was no room for."""
        self.broken = False
        """Whether the peer is gone or took nothing for too long."""

    def send(
        self, kind: int, payload: bytes = b"", fds: Sequence[int] = (), *, epoch: int = 0, sequence: int = 0
    ) -> None:
        """Send now, or keep the frame until `flush`; the caller keeps its descriptors."""
        frames.send(self._send, kind, payload, fds, epoch=epoch, sequence=sequence)

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        if self.broken:
            return
        if not self.waiting and (self._try(data, fds) or self.broken):
            return
        if len(self.waiting) >= LIMIT:
            self._break()
            return
        self.waiting.append((data, [os.dup(fd) for fd in fds]))

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it."""
        while self.waiting:
            data, fds = self.waiting[0]
            if not self._try(data, fds):
                return
            self.waiting.popleft()
            _close(fds)

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
        while self.waiting:
            _close(self.waiting.popleft()[1])


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
        milliseconds = None if seconds is None else 1000 * seconds + 1
        for fd, events in ready(self._poll, milliseconds if block else 0):
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


def readable(*socks: socket.socket) -> set[int]:
    """Return the descriptors of those sockets on which a frame, or the end, is there."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    return {fd for fd, _ in ready(poll, 0)}


LEFT_SECONDS = 10.0
"""How long a message without a mailbox is kept after its sender has ended; arbitrary."""
MOST_FRAMES = 1000
"""Read from one client before the others are polled again; more than a socket's buffer holds (some 280)."""


class ClientKind(Protocol):
    """What acts on the frames of its clients."""

    def received(self, client: Any, frame: Frame) -> None:
        """Act on a frame; the caller closes it.  `ProtocolError`: it is damaged, or not to be expected."""

    def disconnected(self, client: Any, error: Exception | None) -> None:
        """Act on the end of a client's socket, or on how it broke the protocol."""


class Client:
    """One connection, and the process behind it.

    Attributes
    ----------
    number : int
        In the ledger; -1: it is not there (yet).
    pid, pidfd : int
        0 and -1 as long as they are not known; the pidfd is owned.
    doomed : bool
        Whether it is to be killed as soon as its process is known.
    """

    def __init__(self, clients: Clients, sock: socket.socket, kind: ClientKind) -> None:
        self.socket, self.kind = sock, kind
        self.outbox = clients.event_loop.add_socket(sock, lambda: clients.read(self))
        self.number, self.pid, self.pidfd, self.doomed = -1, 0, -1, False

    def kill(self) -> None:
        """Kill its process, now or when that is known."""
        self.doomed = True
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except OSError:
                pass  # it has ended, and been reaped


class Clients:
    """All clients of one supervisor, its event loop, and the ledger of their segments.

    Parameters
    ----------
    log : callable
        Called with a line about a client that broke the protocol.
    """

    def __init__(self, log: Callable[[str], object]) -> None:
        self.event_loop = SupervisorEventLoop()
        self.server = SegmentServer()
        self.by_number: dict[int, Client] = {}
        self._log = log
        self._left: list[tuple[float, int]] = []
        """When parcels without a mailbox are given up, and their dead sender."""

    def admit(self, client: Client, number: int) -> None:
        """Enter a client into the ledger."""
        client.number = number
        self.by_number[number] = client
        self.server.ledger.clients.add(number)

    def work(self, *, block: bool) -> None:
        """Wait for something to happen and act on it; without `block` only look."""
        seconds = max(0.0, self._left[0][0] - time.monotonic()) if self._left else None
        self.event_loop.wait(block=block and not self.server.ledger.unsettled, seconds=seconds)
        self._settle()
        while self._left and self._left[0][0] <= time.monotonic():
            number = self._left.pop(0)[1]
            self.send(self.server.end_parcels(self.server.ledger.parcels.of(number)))

    def read(self, client: Client) -> bool:
        """Act on a client's next frame; return False if it could not be read now."""
        if client.socket.fileno() < 0:
            return True
        try:
            frame = take(client.socket)
            if frame is False:
                return False
            if frame is None:
                client.kind.disconnected(client, None)
                return True
            assert isinstance(frame, Frame)
            try:
                client.kind.received(client, frame)
            finally:
                frame.close()
        except ProtocolError as error:
            self._log(f"client {client.number} broke the protocol: {error}")
            client.kind.disconnected(client, error)
        return True

    def drain(self, client: Client) -> bool:
        """Read what one client has sent; return False if the system has no memory for a message."""
        for _ in range(MOST_FRAMES):
            if client.socket.fileno() < 0 or not readable(client.socket):
                return True
            if not self.read(client):
                return False
        return True

    def pass_on(self, client: Client, frame: Frame) -> None:
        """Have the ledger act on a frame."""
        self.event_loop.linger = frame.kind is Kind.HOLD
        self.send(self.server.receive(client.number, frame))

    def send(self, replies: Iterable[Reply]) -> None:
        """Send what the ledger answers; nothing to a client that has gone."""
        for reply in replies:
            try:
                if (client := self.by_number.get(reply.client)) is not None:
                    client.outbox.send(
                        reply.message.kind, reply.message.pack(), reply.fds, sequence=reply.sequence
                    )
            finally:
                reply.close()

    def _settle(self) -> None:
        """Decide what depends on messages of several clients, after all sockets have been read.

        A client learns of a segment after its REGISTER was sent, and releases it after the HOLD of the client
        that received it: one pass over all sockets settles it.  What the pass brings up is left to the next.
        """
        if not self.server.ledger.unsettled:
            return
        turn = self.server.ledger.mark()
        clients = [client for client in self.by_number.values() if client.socket.fileno() >= 0]
        waiting = readable(*(client.socket for client in clients))
        for client in clients:
            if client.socket.fileno() in waiting and not self.drain(client):
                return  # the system has no memory for a message: try again in the next round
        self.send(self.server.perform(self.server.ledger.settle(turn)))

    def forget(self, client: Client) -> None:
        """Close a client's socket; what it holds stays (idempotent)."""
        self.event_loop.forget(client.socket)
        if self.by_number.get(client.number) is client:
            del self.by_number[client.number]

    def end(self, client: Client) -> None:
        """Close a client's socket and end what it holds."""
        self.forget(client)
        self.send(self.server.perform(self.server.ledger.client_gone(client.number)))
        if self.server.ledger.parcels.of(client.number):
            self._left.append((time.monotonic() + LEFT_SECONDS, client.number))
