"""The supervisor of a world whose processes another program started.

The first of them starts it as ``python -I -S -E``: standard library only, one thread, a session of its own,
soon an orphan (it forks and the first half exits).  It waits until all have joined and sends them the control
segment; from then on it keeps the ledger of segments and writes death records, as a session's supervisor
does.  It kills no process: these belong to their launcher.  It exits with the last of them.

::

    first ──socketpair──┐               JOIN ABORT_JOIN LEAVE_WORLD -> <- JOINED REFUSED
    others ──listener───world           REGISTER FETCH RELEASE … as client rank + 1

A member's death is seen by its pidfd, which it brings along.  The end of its connection alone says nothing,
once there is a world: a dying process closes its files some time before it has ended, and how it ended can be
known only then.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass, field

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.children import SENT_BY_PEOPLE, raise_file_limit, reset_signals
from nbparallel.supervisor.event_loop import Outbox, SupervisorEventLoop, is_ready, readable, take
from nbparallel.supervisor.exit_status import exit_status
from nbparallel.supervisor.external.listener import Listener
from nbparallel.supervisor.guests import KINDS, Guests
from nbparallel.supervisor.ledger.segment_server import Reply, SegmentServer
from nbparallel.supervisor.worlds.membership import Membership
from nbparallel.wire import control
from nbparallel.wire.control import ControlView
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import Process, peer_of, process_of
from nbparallel.wire.rendezvous import Join, Joined, Reason, Refused, client_of
from nbparallel.wire.system import usable_cpus

MOST_FRAMES = 1000
"""Read from one member before the others are polled again."""


@dataclass(slots=True, eq=False)
class WorldMember:
    """A process that is connected."""

    socket: socket.socket
    outbox: Outbox
    rank: int = -1
    """-1: it has not sent JOIN."""
    process: Process = field(default_factory=lambda: Process(0, 0))
    pidfd: int = -1
    """Owned."""


class ExternalWorld:
    """Owns the listener, the connections, the ledger and the control segment.

    Parameters
    ----------
    listener : Listener
        Open, and locked.
    first : socket
        Connection of the process that started this one.
    """

    def __init__(self, listener: Listener, first: socket.socket) -> None:
        self._event_loop = SupervisorEventLoop()
        self._listener = listener
        self._membership = Membership()
        self._members: list[WorldMember] = []
        self._by_client: dict[int, WorldMember] = {}
        self._server = SegmentServer()
        self._guests = Guests(self._event_loop, self._server, self._deliver, _write_line)
        self._view: ControlView | None = None
        self._refused = False
        self._event_loop.add(listener.fileno(), self._on_connect)
        self._add_member(first)

    def run(self) -> None:
        """Serve until no process is connected any more."""
        try:
            while self._members or self._guests.present:
                block = not self._server.unsettled
                self._event_loop.wait(block=block, seconds=self._guests.seconds_left)
                self._settle()
                self._guests.give_up()
        finally:
            self._guests.end_all()
            self._listener.close()
            self._server.close()

    # coming -----------------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        try:
            for sock in self._listener.accept():
                self._add_member(sock)
        except OSError as error:
            self._refuse(Reason.WRONG, f"the supervisor of the world cannot take in a process: {error}")

    def _add_member(self, sock: socket.socket) -> None:
        member = WorldMember(sock, self._event_loop.add_socket(sock, lambda: self._on_frame(member)))
        self._members.append(member)

    def _join(self, member: WorldMember, frame: Frame) -> None:
        join = Join.unpack(frame.payload)
        if member.rank >= 0 or len(frame.fds) != 1:
            raise ProtocolError("a JOIN frame that no process of nbparallel sends")
        pidfd = member.pidfd = frame.fds.pop()
        member.rank, member.process = join.rank, process_of(peer_of(member.socket)[0])
        self._event_loop.add(pidfd, lambda: self._on_death(member))
        problem = self._membership.enter(join, member.process)
        if problem:
            self._refuse(Reason.WRONG, problem)
        elif self._membership.complete:
            self._begin()

    def _begin(self) -> None:
        """Form the world; its names are removed first, so that the next one can use them."""
        membership = self._membership
        try:
            fd = control.create(membership.world_size, 1, label="world")
        except OSError as error:
            self._refuse(Reason.WRONG, f"there is no memory for a world of {membership.world_size}: {error}")
            return
        mine = -1
        try:
            mine = os.pidfd_open(os.getpid())
            self._close_listener()
            self._view = ControlView(fd)
            payload = Joined(usable_cpus(membership.cpus), membership.members).pack()
            for member in [member for member in self._members if member.rank < 0]:
                self._forget(member)  # one too many: it finds no world here, and tries again
            for member in self._members:
                self._by_client[client_of(member.rank)] = member
                self._server.client_joined(client_of(member.rank))
            for member in list(self._members):
                member.outbox.send(Kind.JOINED, payload, [fd, mine])
        finally:
            os.close(fd)
            if mine >= 0:
                os.close(mine)

    def _refuse(self, reason: Reason, text: str) -> None:
        """Notify all connected processes why no world is formed, and stop listening."""
        if self._refused or self._view is not None:
            return
        self._refused = True
        try:
            for sock in self._listener.accept():  # those that have connected already get the reason, too
                self._add_member(sock)
        except OSError:
            pass  # they find no world here, and try again
        self._close_listener()
        for member in list(self._members):
            member.outbox.send(Kind.REFUSED, Refused(reason, text).pack())

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._event_loop.drop(self._listener.fileno())
            self._listener.close()

    # while they are here ------------------------------------------------------------------------------

    def _on_frame(self, member: WorldMember) -> None:
        if member.socket.fileno() < 0:
            return
        try:
            frame = take(member.socket)
            if frame is False:
                return
            if frame is None:
                self._on_end(member)
                return
            assert isinstance(frame, Frame)
            self._receive(member, frame)
        except ProtocolError as error:
            self._reject(member, error)

    def _receive(self, member: WorldMember, frame: Frame) -> None:
        try:
            self._handle(member, frame)
        except (ProtocolError, ValueError, KeyError, TypeError) as error:
            self._reject(member, error)
        finally:
            frame.close()

    def _reject(self, member: WorldMember, error: Exception) -> None:
        # The program may be any, and must not be killed; but it is disconnected.
        _write_line(f"rank {member.rank} broke the protocol: {error}")
        self._lose(member, None, None)

    def _handle(self, member: WorldMember, frame: Frame) -> None:
        if self._refused:
            return
        if frame.kind is Kind.LEAVE_WORLD and self._view is not None:
            # What it has sent may not be received yet: its segments stay until the world ends.
            self._guests.watch_root(client_of(member.rank), os.dup(member.pidfd))
            self._forget(member)
        elif self._view is not None and frame.kind in KINDS:
            self._guests.receive(client_of(member.rank), frame)
        elif self._view is not None:
            self._deliver(self._server.receive(client_of(member.rank), frame))
        elif frame.kind is Kind.JOIN:
            self._join(member, frame)
        elif frame.kind is Kind.ABORT_JOIN and member.rank >= 0:
            text = f"rank {member.rank} has waited {float(frame.payload):g} s for {self._membership.missing}"
            self._refuse(Reason.LATE, f"{text}, which did not join")
        else:
            raise ProtocolError(f"unexpected {frame.kind.name} frame before the world is complete")

    def _deliver(self, outgoing: list[Reply]) -> None:
        for item in outgoing:
            member = self._by_client.get(item.client)
            try:
                if not self._guests.send(item) and member is not None:
                    member.outbox.send(item.kind, item.payload, item.fds, sequence=item.sequence)
            finally:
                item.close()

    def _settle(self) -> None:
        """Decide what depends on messages of several members, as `Supervisor` does."""
        if not self._server.unsettled:
            return
        turn = self._server.mark()
        for member in list(self._members):
            self._drain(member)
        if self._guests.drain():
            self._deliver(self._server.settle(turn))

    def _drain(self, member: WorldMember) -> None:
        for _ in range(MOST_FRAMES):
            if member.socket.fileno() < 0 or not readable(member.socket):
                return
            self._on_frame(member)

    # going ------------------------------------------------------------------------------------------

    def _on_end(self, member: WorldMember) -> None:
        if self._view is None:
            self._lose(member, None, None)
        else:
            self._event_loop.forget(member.socket)  # its pidfd reports the rest, as a rule soon

    def _on_death(self, member: WorldMember) -> None:
        if not is_ready(member.pidfd):
            return  # another one's pidfd had this number a moment ago
        code, number = exit_status(member.pidfd, member.process)
        try:
            while member.socket.fileno() >= 0 and isinstance(frame := take(member.socket), Frame):
                self._receive(member, frame)  # what it sent before it ended counts, such as LEAVE_WORLD
        except ProtocolError:
            pass  # it is dead, whatever it sent
        self._lose(member, code, number)

    def _lose(self, member: WorldMember, code: int | None, number: int | None) -> None:
        if member not in self._members:
            return
        self._forget(member)
        if self._view is not None:
            self._view.write_death(member.rank, exit_code=code, signal=number)
            self._deliver(self._server.client_gone(client_of(member.rank)))
            self._guests.client_gone(client_of(member.rank))
        elif member.rank >= 0:
            whose = f"rank {member.rank} (process {member.process.pid})"
            self._refuse(Reason.WRONG, f"{whose} left or ended before {self._membership.missing} had joined")

    def _forget(self, member: WorldMember) -> None:
        self._members.remove(member)
        self._by_client.pop(client_of(member.rank), None)
        self._event_loop.forget(member.socket)
        if member.pidfd >= 0:
            self._event_loop.drop(member.pidfd)
            os.close(member.pidfd)
            member.pidfd = -1


def _write_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(place: int, first: int, path: str) -> None:
    """Run a world's supervisor over inherited descriptors; the process that calls this exits immediately."""
    if os.fork():
        os._exit(0)
    reset_signals()
    raise_file_limit()
    for number in SENT_BY_PEOPLE:
        signal.signal(number, signal.SIG_IGN)
    for fd in (place, first):
        os.set_inheritable(fd, False)
    ExternalWorld(Listener(place, path), socket.socket(fileno=first)).run()
