"""Clients: the processes that a supervisor serves, whichever program started them.

There is one kind of connection: a socket that is read frame by frame, an outbox, and a *host* that acts on
what is special: `main` (kernel and ranks), `guests` (processes that clients have started), `external` and
`worlds` (processes that form a world).  What is about segments goes to the ledger from all of them alike.
A client that breaks the protocol is the host's to judge: a rank is killed, another's program is disconnected.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.event_loop import SupervisorEventLoop, readable, take
from nbparallel.supervisor.ledger.segment_server import Reply, SegmentServer
from nbparallel.wire.frames import Frame, Kind

LEFT_SECONDS = 10.0
"""How long a message without a mailbox is kept after its sender has ended; arbitrary."""
MOST_FRAMES = 1000
"""Read from one client before the others are polled again; more than a socket's buffer holds (some 280)."""


class ClientHost(Protocol):
    """What acts on the frames of its clients."""

    def received(self, client: Any, frame: Frame) -> None:
        """Act on a frame; the caller closes it.  `ProtocolError`: it is damaged, or not to be expected."""

    def disconnected(self, client: Any) -> None:
        """Act on the end of a client's socket."""

    def broke(self, client: Any, error: Exception) -> None:
        """Act on a breach of the protocol."""


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

    def __init__(self, clients: Clients, sock: socket.socket, host: ClientHost) -> None:
        self.socket, self.host = sock, host
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
        self.server.client_joined(number)

    def work(self, *, block: bool) -> None:
        """Wait for something to happen and act on it; without `block` only look."""
        seconds = max(0.0, self._left[0][0] - time.monotonic()) if self._left else None
        self.event_loop.wait(block=block and not self.server.unsettled, seconds=seconds)
        self._settle()
        while self._left and self._left[0][0] <= time.monotonic():
            number = self._left.pop(0)[1]
            self.send(self.server.end_parcels(self.server.parcels_of(number)))

    def read(self, client: Client) -> bool:
        """Act on a client's next frame; return False if it could not be read now."""
        if client.socket.fileno() < 0:
            return True
        try:
            frame = take(client.socket)
            if frame is False:
                return False
            if frame is None:
                client.host.disconnected(client)
                return True
            assert isinstance(frame, Frame)
            try:
                client.host.received(client, frame)
            finally:
                frame.close()
        except ProtocolError as error:
            self._log(f"client {client.number} broke the protocol: {error}")
            client.host.broke(client, error)
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
        if not self.server.unsettled:
            return
        turn = self.server.mark()
        clients = [client for client in self.by_number.values() if client.socket.fileno() >= 0]
        waiting = readable(*(client.socket for client in clients))
        for client in clients:
            if client.socket.fileno() in waiting and not self.drain(client):
                return  # the system has no memory for a message: try again in the next round
        self.send(self.server.settle(turn))

    def forget(self, client: Client) -> None:
        """Close a client's socket; what it holds stays (idempotent)."""
        self.event_loop.forget(client.socket)
        if self.by_number.get(client.number) is client:
            del self.by_number[client.number]

    def end(self, client: Client) -> None:
        """Close a client's socket and end what it holds."""
        self.forget(client)
        self.send(self.server.client_gone(client.number))
        if self.server.parcels_of(client.number):
            self._left.append((time.monotonic() + LEFT_SECONDS, client.number))
