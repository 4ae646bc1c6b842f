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

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.children import SENT_BY_PEOPLE, raise_file_limit, reset_signals
from nbparallel.supervisor.clients import Clients, is_ready
from nbparallel.supervisor.external.listener import Listener
from nbparallel.supervisor.worlds import KINDS, IntroducedClients, World, WorldMember, exit_status
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import Join, Reason, Refused, client_of


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
        self._clients = Clients(lambda text: sys.stderr.write(f"{text}\n"))
        self._introduced = IntroducedClients(self._clients)
        self._listener = listener
        self._world = World()
        self._members: list[WorldMember] = []
        """All that are connected, whether they have joined or not."""
        self._refused = False
        self._clients.event_loop.add(listener.fileno(), self._on_connect)
        self._add_member(first)

    def run(self) -> None:
        """Serve until no process is connected any more."""
        try:
            while self._members or self._introduced.present:
                self._clients.work(block=True)
        finally:
            self._introduced.end_all()
            self._listener.close()
            self._clients.server.close()

    # coming -----------------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        try:
            for sock in self._listener.accept():
                self._add_member(sock)
        except OSError as error:
            self._refuse(Reason.WRONG, f"the supervisor of the world cannot take in a process: {error}")

    def _add_member(self, sock: socket.socket) -> None:
        self._members.append(WorldMember(self._clients, sock, self))

    def _join(self, member: WorldMember, frame: Frame) -> None:
        join = Join.unpack(frame.payload)
        if member.rank >= 0 or len(frame.fds) != 1:
            raise ProtocolError("a JOIN frame that no process of nbparallel sends")
        member.pidfd = frame.fds.pop()
        self._clients.event_loop.add(member.pidfd, lambda: self._on_death(member))
        problem = self._world.enter(member, join)
        if not problem and self._world.membership.complete:
            problem = self._world.form(self._begin)
        if problem:
            self._refuse(Reason.WRONG, problem)

    def _begin(self) -> None:
        self._close_listener()  # removes its names, so that the next world can use them
        for member in [member for member in self._members if member.rank < 0]:
            self._forget(member)  # one too many: it finds no world here, and tries again
        for member in self._members:
            self._clients.admit(member, client_of(member.rank))

    def _refuse(self, reason: Reason, text: str) -> None:
        """Notify all connected processes why no world is formed, and stop listening."""
        if self._refused or self._world.view is not None:
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
            self._clients.event_loop.drop(self._listener.fileno())
            self._listener.close()

    # while they are here ------------------------------------------------------------------------------

    def received(self, member: WorldMember, frame: Frame) -> None:
        """Act on a member's frame."""
        if self._refused:
            return
        if self._world.view is not None:
            if frame.kind is Kind.LEAVE_WORLD:
                # What it has sent may not be received yet: its segments stay until the world ends.
                self._introduced.watch_root(member.number, os.dup(member.pidfd))
                self._forget(member)
            elif frame.kind in KINDS:
                self._introduced.received(member, frame)
            else:
                self._clients.pass_on(member, frame)
        elif frame.kind is Kind.JOIN:
            self._join(member, frame)
        elif frame.kind is Kind.ABORT_JOIN and member.rank >= 0:
            self._refuse(Reason.LATE, self._world.late_text(member, frame))
        else:
            raise ProtocolError(f"unexpected {frame.kind.name} frame before the world is complete")

    # going ------------------------------------------------------------------------------------------

    def disconnected(self, member: WorldMember) -> None:
        """Act on the end of a member's socket."""
        if self._world.view is None:
            self._lose(member, None, None)
        else:
            self._clients.event_loop.forget(member.socket)  # its pidfd reports the rest, as a rule soon

    def broke(self, member: WorldMember, error: Exception) -> None:
        """Disconnect a member: its program may be any, and must not be killed."""
        self._lose(member, None, None)

    def _on_death(self, member: WorldMember) -> None:
        if not is_ready(member.pidfd):
            return  # another one's pidfd had this number a moment ago
        code, number = exit_status(member.pidfd, member.process)
        self._clients.drain(member)  # what it sent before it ended counts, such as LEAVE_WORLD
        self._lose(member, code, number)

    def _lose(self, member: WorldMember, code: int | None, number: int | None) -> None:
        if member not in self._members:
            return
        self._forget(member)
        if self._world.view is not None:
            self._world.view.write_death(member.rank, exit_code=code, signal=number)
            self._clients.end(member)
            self._introduced.end_with(member.number)
        elif member.rank >= 0:
            self._refuse(Reason.WRONG, self._world.lost_text(member))

    def _forget(self, member: WorldMember) -> None:
        self._members.remove(member)
        self._clients.forget(member)
        self._clients.event_loop.close(member.pidfd)
        member.pidfd = -1


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
