"""Introduced clients: processes that clients have started themselves.

Such a client is a child of the process that started it, or of none: so that introduces it before, with one
end of a socketpair.  It is a client from then on, and holds what its parent holds if it is forked.  Which
process it is, it announces itself at the other end, with its pidfd.  Its holds end with it, which the pidfd
reports; the end of its connection says only that it can share nothing any more.

If that does not come, the end of the connection shows that there is no process.  Only a copy that another
thread of the parent forked before that could still have the other end open: then what a child that died so
early inherited is held as long as that copy lives.

They are ended with their *root*, the member by whose socket the first of them came, and the daemonic ones
with the process that started them.  The others outlive it, as children of other programs do.

Note [admission]
----------------
It says nothing before it has been welcomed.  So whatever it sent before a pass over all sockets began
(`Ledger.mark`) lies in a socket that this pass reads, although they are admitted at any time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.clients import Client, Clients, is_ready
from nbparallel.supervisor.worlds import ClientWorlds
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.inspection import IntroducedRow
from nbparallel.wire.parcels import Introduction
from nbparallel.wire.segments import FIRST_INTRODUCED, MAX_CLIENT, Announce, Welcome

KINDS = frozenset({Kind.INTRODUCE, Kind.ANNOUNCE, Kind.MEET, Kind.LEAVE_WORLD})
"""What `IntroducedClients.received` acts on; the rest is for the ledger."""


class IntroducedProcess(Client):
    """One process.

    Attributes
    ----------
    parent : int
        Client number of the process that started it.
    root : int
        Of the member with which it ends.
    daemon : bool
        Whether it ends with its parent.
    """

    parent: int
    root: int
    daemon: bool


class IntroducedClients:
    """Those of one supervisor."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._present: dict[int, IntroducedProcess] = {}
        self._worlds = ClientWorlds(clients)
        self._admitted = 0
        """How many there have been."""

    # coming -----------------------------------------------------------------------------------------

    def received(self, sender: Client, frame: Frame) -> None:
        """Act on a frame, which came over the socket of one of them, or one of `KINDS` from another client.

        Raises
        ------
        ProtocolError
            It is damaged.
        """
        client = self._present.get(sender.number)
        if frame.kind not in KINDS:
            self._clients.pass_on(sender, frame)
        elif frame.kind is Kind.INTRODUCE:
            self._on_introduce(sender.number, frame)
        elif client is None:
            raise ProtocolError(
                f"a {frame.kind.name} frame of client {sender.number}, which was not introduced"
            )
        elif frame.kind is Kind.ANNOUNCE:
            self._on_announce(client, frame)
        elif client.pidfd < 0:
            raise ProtocolError(f"a {frame.kind.name} frame of client {sender.number} before its ANNOUNCE")
        elif frame.kind is Kind.MEET:
            self._worlds.meet(client.number, frame)
        else:
            self._worlds.leave(client.number)

    def _on_introduce(self, parent: int, frame: Frame) -> None:
        introduction = Introduction.unpack(frame.payload)
        _check_descriptors(frame)
        number, inviter = FIRST_INTRODUCED + self._admitted, self._present.get(parent)
        if number >= MAX_CLIENT:
            raise ProtocolError(f"an INTRODUCE frame of client {number}: there were too many")
        try:
            sock = socket.socket(fileno=frame.fds[-1])
            frame.fds.pop()
            client = IntroducedProcess(self._clients, sock, self)
        except OSError as error:
            raise ProtocolError(f"an INTRODUCE frame without a socket: {error}") from error
        client.parent, client.root = parent, parent if inviter is None else inviter.root
        client.daemon = introduction.daemon
        self._admitted += 1
        self._present[number] = client
        self._clients.admit(client, number)
        if introduction.inherits:
            self._clients.server.ledger.inherit(number, parent)
        client.outbox.send(Kind.WELCOME, Welcome(number).pack())

    def _on_announce(self, client: IntroducedProcess, frame: Frame) -> None:
        if client.pid:
            raise ProtocolError("a second ANNOUNCE frame on one connection")
        client.pid = Announce.unpack(frame.payload).pid
        _check_descriptors(frame)
        client.pidfd = frame.fds.pop()
        self._clients.event_loop.add(client.pidfd, lambda: self._on_exit(client))
        if client.doomed:
            client.kill()

    # while they are here ----------------------------------------------------------------------------

    def rows(self) -> Iterator[IntroducedRow]:
        """Yield a record of each."""
        for client in self._present.values():
            if client.pid:
                yield IntroducedRow(client.number, client.pid, client.parent, client.daemon)

    @property
    def present(self) -> bool:
        """Whether there is any."""
        return bool(self._present)

    # going ------------------------------------------------------------------------------------------

    def disconnected(self, client: IntroducedProcess) -> None:
        """Act on the end of its socket."""
        if self._worlds.has_rank(client.number):
            self._clients.event_loop.forget(client.socket)  # its pidfd reports the rest, as a rule soon
        else:
            self.broke(client)

    def broke(self, client: IntroducedProcess, error: Exception | None = None) -> None:
        """Disconnect it: its program may be any, and must not be killed."""
        if client.pidfd < 0:
            self._end(client)  # there is no child, or it has ended
        else:
            # What it did not release is not used again: it may still have it mapped.
            self._clients.end(client)

    def _on_exit(self, client: IntroducedProcess) -> None:
        if self._present.get(client.number) is not client or not is_ready(client.pidfd):
            return  # another one's pidfd had this number a moment ago
        self._clients.drain(client)  # what it sent before it ended counts
        was_rank = self._worlds.has_rank(client.number)
        # before its segments end: the others learn why
        self._worlds.client_ended(client.number, client.pidfd)
        self._end(client, disconnect=was_rank)

    def _end(self, client: IntroducedProcess, *, disconnect: bool = False) -> None:
        """Forget one whose process has ended, or was never there."""
        if disconnect or client.socket.fileno() >= 0:
            self._clients.end(client)
        del self._present[client.number]
        self._clients.event_loop.close(client.pidfd)
        self.end_with(client.number)

    def end_with(self, number: int) -> None:
        """End those that end with a client, whose process has ended."""
        for client in self._present.values():
            if client.root == number or (client.daemon and client.parent == number):
                client.kill()

    def watch_root(self, number: int, pidfd: int) -> None:
        """End those of a member with its process, now that it is no member any more; takes over the pidfd."""
        if not any(client.root == number for client in self._present.values()):
            os.close(pidfd)
            return

        def end() -> None:
            self._clients.event_loop.close(pidfd)
            self.end_with(number)

        self._clients.event_loop.once(pidfd, end)

    def end_all(self) -> None:
        """End every one and close what belongs to them: the supervisor exits."""
        for client in list(self._present.values()):
            if client.pidfd < 0:
                # Its identity is in what it has sent; if it sends that from now on, it fails, and exits.
                _refuse(client.socket)
                self._clients.drain(client)
        while self._present:
            client = self._present.popitem()[1]
            client.kill()
            self._clients.forget(client)
            self._clients.event_loop.close(client.pidfd)
        self._worlds.end_all()


def _check_descriptors(frame: Frame) -> None:
    if len(frame.fds) != 1:
        raise ProtocolError(f"an {frame.kind.name} frame with {len(frame.fds)} descriptors")


def _refuse(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # the other end is closed
