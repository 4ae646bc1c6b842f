"""Guests: processes that the supervisor's clients have started themselves, and that are clients as well.

A guest is a child of the process that started it, or of none: so that introduces it before, with one end of a
socketpair.  It is a guest from then on, and holds what its parent holds if it is forked.  Which process it
is, it announces itself at the other end, with its pidfd.  Its holds end with it, which the pidfd reports; the
end of its connection says only that it can share nothing any more.

If the parent sends a pidfd of a forked child first, that counts as well.  If neither comes, the end of the
connection shows that there is no process: only a copy that another thread of the parent forked before that
could still have the other end open, and what a child inherits is covered by the parent's pidfd.

Guests are ended with their *root*, the member by whose socket the first of them came, and the daemonic ones
with the process that started them.  The others outlive it, as children of other programs do.

Note [admission]
----------------
A guest says nothing before it has been welcomed.  So whatever it sent before a pass over all sockets began
(`SegmentServer.mark`) lies in a socket that this pass reads, although guests are admitted at any time.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.event_loop import Outbox, SupervisorEventLoop, is_ready, readable, take
from nbparallel.supervisor.ledger.segment_server import Reply, SegmentServer
from nbparallel.supervisor.worlds.hosted_worlds import HostedWorlds
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import unpack_pid
from nbparallel.wire.inspection import GuestRow
from nbparallel.wire.parcels import FIRST_GUEST, Introduction, pack_client, unpack_id
from nbparallel.wire.segments import MAX_CLIENT

LEFT_SECONDS = 10.0
"""How long a message without a mailbox is kept after its sender has ended; arbitrary."""
MOST_FRAMES = 1000
"""Read from one guest before the others are polled again."""
KINDS = frozenset({Kind.INTRODUCE, Kind.FORK_DONE, Kind.ANNOUNCE, Kind.MEET, Kind.LEAVE_WORLD})
"""What `Guests.receive` acts on; the rest is for the ledger."""


@dataclass(slots=True, eq=False)
class Guest:
    """One process."""

    client: int
    parent: int
    """Client number of the process that started it."""
    root: int
    """Of the member with which it ends."""
    daemon: bool
    socket: socket.socket
    outbox: Outbox
    process: int
    """By which its parent names it."""
    pid: int = 0
    """0: it has not said so."""
    pidfd: int = -1
    """Owned; -1: not known yet."""
    doomed: bool = False
    """Whether it is to be ended as soon as that is known."""


class Guests:
    """The guests of one supervisor.

    Parameters
    ----------
    deliver : callable
        Called with the ledger's replies, to guests and to members.
    log : callable
        Called with a line about a guest that broke the protocol.
    """

    def __init__(
        self,
        event_loop: SupervisorEventLoop,
        server: SegmentServer,
        deliver: Callable[[list[Reply]], None],
        log: Callable[[str], None],
    ) -> None:
        self._event_loop, self._server, self._deliver, self._log = event_loop, server, deliver, log
        self._guests: dict[int, Guest] = {}
        self._unborn: dict[tuple[int, int], Guest] = {}
        """Guests whose process is not known yet, by parent and the parent's name for it."""
        self._left: list[tuple[float, int]] = []
        """When parcels without a mailbox are given up, and their dead sender."""
        self._worlds = HostedWorlds(event_loop, server, deliver, log)
        self._admitted = 0
        """How many guests there have been."""

    # coming -----------------------------------------------------------------------------------------

    def receive(self, sender: int, frame: Frame) -> None:
        """Act on a frame of one of `KINDS`, which came over the socket of client `sender`, or a copy of it.

        Raises
        ------
        ProtocolError
            It is damaged.
        """
        if frame.kind is Kind.INTRODUCE:
            self._on_introduce(sender, frame)
        elif frame.kind is Kind.FORK_DONE:
            self._on_fork_done(sender, frame)
        elif (guest := self._guests.get(sender)) is None:
            raise ProtocolError(f"a {frame.kind.name} frame of client {sender}, which is no guest")
        elif frame.kind is Kind.ANNOUNCE:
            self._on_announce(guest, frame)
        elif guest.pidfd < 0:
            raise ProtocolError(f"a {frame.kind.name} frame of client {sender} before its ANNOUNCE")
        elif frame.kind is Kind.MEET:
            self._worlds.meet(sender, frame)
        else:
            self._worlds.leave(sender)

    def _on_introduce(self, parent: int, frame: Frame) -> None:
        introduction = Introduction.unpack(frame.payload)
        _check_descriptors(frame)
        client, inviter = FIRST_GUEST + self._admitted, self._guests.get(parent)
        key = parent, introduction.process
        if client >= MAX_CLIENT or key in self._unborn:
            raise ProtocolError(f"an INTRODUCE frame of process {introduction.process:#x}, client {client}")
        try:
            sock = socket.socket(fileno=frame.fds[-1])
            frame.fds.pop()
            outbox = self._event_loop.add_socket(sock, lambda: self._on_frame(client))
        except OSError as error:
            raise ProtocolError(f"an INTRODUCE frame without a socket: {error}") from error
        root = parent if inviter is None else inviter.root
        guest = Guest(client, parent, root, introduction.daemon, sock, outbox, introduction.process)
        self._admitted += 1
        self._guests[client] = self._unborn[key] = guest
        self._server.client_joined(client)
        if introduction.inherits:
            self._server.inherit(client, parent)
        outbox.send(Kind.WELCOME, pack_client(client))

    def _on_announce(self, guest: Guest, frame: Frame) -> None:
        if guest.pid:
            raise ProtocolError("a second ANNOUNCE frame on one connection")
        guest.pid = unpack_pid(frame.payload)
        _check_descriptors(frame)
        if guest.pidfd < 0:  # else its parent was quicker
            self._watch(guest, frame.fds.pop())

    def _on_fork_done(self, parent: int, frame: Frame) -> None:
        guest = self._unborn.get((parent, unpack_id(frame.payload, frame.kind)))
        if guest is None:
            return  # it was quicker, or has ended already
        if frame.fds:
            self._watch(guest, frame.fds.pop())
        else:
            self._end(guest)

    def _watch(self, guest: Guest, pidfd: int) -> None:
        """Have a guest's process, which is known now, end it."""
        guest.pidfd = pidfd
        self._unborn.pop((guest.parent, guest.process), None)
        self._event_loop.add(pidfd, lambda: self._on_end(guest.client))
        if guest.doomed:
            _kill(guest)

    # while they are here ----------------------------------------------------------------------------

    def send(self, reply: Reply) -> bool:
        """Send a reply if it is for a guest; return whether it is."""
        if reply.client < FIRST_GUEST:
            return False
        guest = self._guests.get(reply.client)
        if guest is not None:
            guest.outbox.send(reply.kind, reply.payload, reply.fds, sequence=reply.sequence)
        return True

    def drain(self) -> bool:
        """Read all that guests have sent; return False if the system has no memory for a message."""
        return all(self.drain_guest(guest) for guest in list(self._guests.values()))

    def drain_guest(self, guest: Guest) -> bool:
        """Read what one guest has sent, as `drain`."""
        for _ in range(MOST_FRAMES):
            if guest.socket.fileno() < 0 or not readable(guest.socket):
                return True
            if not self._on_frame(guest.client):
                return False
        return True

    def _on_frame(self, client: int) -> bool:
        """Act on a guest's next frame; return False if it could not be read now."""
        guest = self._guests.get(client)
        if guest is None or guest.socket.fileno() < 0:
            return True
        try:
            frame = take(guest.socket)
            if frame is False:
                return False
            if frame is None and self._worlds.has_rank(client):
                self._event_loop.forget(guest.socket)  # its pidfd reports the rest, as a rule soon
                return True
            if frame is None and guest.pidfd < 0:
                self._end(guest)  # there is no child, or it has ended
                return True
            if frame is None:
                # What it did not release is not used again: it may still have it mapped.
                self._disconnect(guest)
                return True
            assert isinstance(frame, Frame)
            try:
                if frame.kind in KINDS:
                    self.receive(client, frame)
                else:
                    self._event_loop.linger = frame.kind is Kind.HOLD
                    self._deliver(self._server.receive(client, frame))
            finally:
                frame.close()
        except ProtocolError as error:
            # Its program may be any, and must not be killed; but it is disconnected.
            self._log(f"client {client} broke the protocol: {error}")
            if guest.pidfd < 0:
                self._end(guest)
            else:
                self._disconnect(guest)
        return True

    def rows(self) -> Iterator[GuestRow]:
        """Yield a record of each guest."""
        for guest in self._guests.values():
            if guest.pid:
                yield GuestRow(guest.client, guest.pid, guest.parent, guest.daemon)

    # going ------------------------------------------------------------------------------------------

    def _disconnect(self, guest: Guest) -> None:
        self._event_loop.forget(guest.socket)
        self._deliver(self._server.client_gone(guest.client))
        self.client_gone(guest.client, ended=False)

    def _on_end(self, client: int) -> None:
        guest = self._guests.get(client)
        if guest is None or not is_ready(guest.pidfd):
            return  # another one's pidfd had this number a moment ago
        self.drain_guest(guest)  # what it sent before it ended counts
        was_rank = self._worlds.has_rank(client)
        self._worlds.client_ended(client, guest.pidfd)  # before its segments end: the others learn why
        self._end(guest, disconnect=was_rank)

    def _end(self, guest: Guest, *, disconnect: bool = False) -> None:
        """Forget a guest whose process has ended, or was never there."""
        if disconnect or guest.socket.fileno() >= 0:
            self._disconnect(guest)
        del self._guests[guest.client]
        self._unborn.pop((guest.parent, guest.process), None)
        self._event_loop.close(guest.pidfd)
        self.client_gone(guest.client)

    def client_gone(self, client: int, *, ended: bool = True) -> None:
        """End what ends with a client, a member or a guest; `ended`: its process, not only the connection."""
        if self._server.parcels_of(client):
            self._left.append((time.monotonic() + LEFT_SECONDS, client))
        if ended:
            for guest in self._guests.values():
                if guest.root == client or (guest.daemon and guest.parent == client):
                    _kill(guest)

    def watch_root(self, client: int, pidfd: int) -> None:
        """End a member's guests with its process, now that it is no member any more; takes over the pidfd."""
        if not any(guest.root == client for guest in self._guests.values()):
            os.close(pidfd)
            return

        def end() -> None:
            self._event_loop.close(pidfd)
            self.client_gone(client)

        self._event_loop.once(pidfd, end)

    @property
    def present(self) -> bool:
        """Whether there is any."""
        return bool(self._guests)

    def end_all(self) -> None:
        """End every guest and close what belongs to them: the supervisor exits."""
        for guest in list(self._guests.values()):
            if guest.pidfd < 0:
                # Its identity is in what it has sent; if it sends that from now on, it fails, and exits.
                _refuse(guest.socket)
                self.drain_guest(guest)
        while self._guests:
            guest = self._guests.popitem()[1]
            _kill(guest)
            self._event_loop.forget(guest.socket)
            self._event_loop.close(guest.pidfd)
        self._unborn.clear()
        self._worlds.end_all()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `give_up` has something to do; None: it has not."""
        return max(0.0, self._left[0][0] - time.monotonic()) if self._left else None

    def give_up(self) -> None:
        """End the parcels without a mailbox whose sender ended some time ago."""
        while self._left and self._left[0][0] <= time.monotonic():
            client = self._left.pop(0)[1]
            self._deliver(self._server.end_parcels(self._server.parcels_of(client)))


def _check_descriptors(frame: Frame) -> None:
    if len(frame.fds) != 1:
        raise ProtocolError(f"an {frame.kind.name} frame with {len(frame.fds)} descriptors")


def _refuse(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # the other end is closed


def _kill(guest: Guest) -> None:
    if guest.pidfd < 0:
        guest.doomed = True
        return
    try:
        signal.pidfd_send_signal(guest.pidfd, signal.SIGKILL)
    except OSError:
        pass  # it has ended, and been reaped
