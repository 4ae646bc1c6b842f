"""Guests: processes that the supervisor's clients have started themselves, and that are clients as well.

A guest is a child of the process that started it, or of none: so that introduces it before, with one end of a
socketpair.  It is a guest from then on, and holds what its parent holds if it is forked.  Which process it
is, it announces itself at the other end, with its pidfd.  Its holds end with it, which the pidfd reports; the
end of its connection says only that it can share nothing any more.

If that does not come, the end of the connection shows that there is no process.  Only a copy that another
thread of the parent forked before that could still have the other end open: then what a child that died so
early inherited is held as long as that copy lives.

Guests are ended with their *root*, the member by whose socket the first of them came, and the daemonic ones
with the process that started them.  The others outlive it, as children of other programs do.

Note [admission]
----------------
A guest says nothing before it has been welcomed.  So whatever it sent before a pass over all sockets began
(`Ledger.mark`) lies in a socket that this pass reads, although guests are admitted at any time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.clients import Client, Clients, is_ready
from nbparallel.supervisor.worlds.hosted_worlds import HostedWorlds
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.inspection import GuestRow
from nbparallel.wire.parcels import Introduction
from nbparallel.wire.segments import FIRST_GUEST, MAX_CLIENT, Announce, Welcome

KINDS = frozenset({Kind.INTRODUCE, Kind.ANNOUNCE, Kind.MEET, Kind.LEAVE_WORLD})
"""What `Guests.received` acts on; the rest is for the ledger."""


class Guest(Client):
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


class Guests:
    """The guests of one supervisor."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._guests: dict[int, Guest] = {}
        self._worlds = HostedWorlds(clients)
        self._admitted = 0
        """How many guests there have been."""

    # coming -----------------------------------------------------------------------------------------

    def received(self, sender: Client, frame: Frame) -> None:
        """Act on a frame, which came over the socket of a guest, or one of `KINDS` from another client.

        Raises
        ------
        ProtocolError
            It is damaged.
        """
        guest = self._guests.get(sender.number)
        if frame.kind not in KINDS:
            self._clients.pass_on(sender, frame)
        elif frame.kind is Kind.INTRODUCE:
            self._on_introduce(sender.number, frame)
        elif guest is None:
            raise ProtocolError(f"a {frame.kind.name} frame of client {sender.number}, which is no guest")
        elif frame.kind is Kind.ANNOUNCE:
            self._on_announce(guest, frame)
        elif guest.pidfd < 0:
            raise ProtocolError(f"a {frame.kind.name} frame of client {sender.number} before its ANNOUNCE")
        elif frame.kind is Kind.MEET:
            self._worlds.meet(guest.number, frame)
        else:
            self._worlds.leave(guest.number)

    def _on_introduce(self, parent: int, frame: Frame) -> None:
        introduction = Introduction.unpack(frame.payload)
        _check_descriptors(frame)
        number, inviter = FIRST_GUEST + self._admitted, self._guests.get(parent)
        if number >= MAX_CLIENT:
            raise ProtocolError(f"an INTRODUCE frame of client {number}: there were too many")
        try:
            sock = socket.socket(fileno=frame.fds[-1])
            frame.fds.pop()
            guest = Guest(self._clients, sock, self)
        except OSError as error:
            raise ProtocolError(f"an INTRODUCE frame without a socket: {error}") from error
        guest.parent, guest.root = parent, parent if inviter is None else inviter.root
        guest.daemon = introduction.daemon
        self._admitted += 1
        self._guests[number] = guest
        self._clients.admit(guest, number)
        if introduction.inherits:
            self._clients.server.ledger.inherit(number, parent)
        guest.outbox.send(Kind.WELCOME, Welcome(number).pack())

    def _on_announce(self, guest: Guest, frame: Frame) -> None:
        if guest.pid:
            raise ProtocolError("a second ANNOUNCE frame on one connection")
        guest.pid = Announce.unpack(frame.payload).pid
        _check_descriptors(frame)
        guest.pidfd = frame.fds.pop()
        self._clients.event_loop.add(guest.pidfd, lambda: self._on_exit(guest))
        if guest.doomed:
            guest.kill()

    # while they are here ----------------------------------------------------------------------------

    def rows(self) -> Iterator[GuestRow]:
        """Yield a record of each guest."""
        for guest in self._guests.values():
            if guest.pid:
                yield GuestRow(guest.number, guest.pid, guest.parent, guest.daemon)

    @property
    def present(self) -> bool:
        """Whether there is any."""
        return bool(self._guests)

    # going ------------------------------------------------------------------------------------------

    def disconnected(self, guest: Guest) -> None:
        """Act on the end of a guest's socket."""
        if self._worlds.has_rank(guest.number):
            self._clients.event_loop.forget(guest.socket)  # its pidfd reports the rest, as a rule soon
        else:
            self.broke(guest)

    def broke(self, guest: Guest, error: Exception | None = None) -> None:
        """Disconnect a guest: its program may be any, and must not be killed."""
        if guest.pidfd < 0:
            self._end(guest)  # there is no child, or it has ended
        else:
            # What it did not release is not used again: it may still have it mapped.
            self._clients.end(guest)

    def _on_exit(self, guest: Guest) -> None:
        if self._guests.get(guest.number) is not guest or not is_ready(guest.pidfd):
            return  # another one's pidfd had this number a moment ago
        self._clients.drain(guest)  # what it sent before it ended counts
        was_rank = self._worlds.has_rank(guest.number)
        # before its segments end: the others learn why
        self._worlds.client_ended(guest.number, guest.pidfd)
        self._end(guest, disconnect=was_rank)

    def _end(self, guest: Guest, *, disconnect: bool = False) -> None:
        """Forget a guest whose process has ended, or was never there."""
        if disconnect or guest.socket.fileno() >= 0:
            self._clients.end(guest)
        del self._guests[guest.number]
        self._clients.event_loop.close(guest.pidfd)
        self.end_with(guest.number)

    def end_with(self, number: int) -> None:
        """End the guests that end with a client, whose process has ended."""
        for guest in self._guests.values():
            if guest.root == number or (guest.daemon and guest.parent == number):
                guest.kill()

    def watch_root(self, number: int, pidfd: int) -> None:
        """End a member's guests with its process, now that it is no member any more; takes over the pidfd."""
        if not any(guest.root == number for guest in self._guests.values()):
            os.close(pidfd)
            return

        def end() -> None:
            self._clients.event_loop.close(pidfd)
            self.end_with(number)

        self._clients.event_loop.once(pidfd, end)

    def end_all(self) -> None:
        """End every guest and close what belongs to them: the supervisor exits."""
        for guest in list(self._guests.values()):
            if guest.pidfd < 0:
                # Its identity is in what it has sent; if it sends that from now on, it fails, and exits.
                _refuse(guest.socket)
                self._clients.drain(guest)
        while self._guests:
            guest = self._guests.popitem()[1]
            guest.kill()
            self._clients.forget(guest)
            self._clients.event_loop.close(guest.pidfd)
        self._worlds.end_all()


def _check_descriptors(frame: Frame) -> None:
    if len(frame.fds) != 1:
        raise ProtocolError(f"an {frame.kind.name} frame with {len(frame.fds)} descriptors")


def _refuse(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # the other end is closed
