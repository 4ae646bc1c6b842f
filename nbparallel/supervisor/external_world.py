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

import errno
import os
import socket
import sys
from collections.abc import Iterator

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.children import become_supervisor
from nbparallel.supervisor.clients import Clients, is_ready
from nbparallel.supervisor.worlds import KINDS, IntroducedClients, World, WorldMember, exit_code_of
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import DRAFT, SOCKET, Refused, client_of, peer_of

# The listening socket to which processes that nbparallel did not start connect for their supervisor.
#
# It is open only until all have connected; then nothing of it has a name any more.
#
# Some facts about named Unix sockets (unix(7), socket(7), flock(2)):
#
# * connecting needs the right to enter the directory and to write to the socket, whose mode is the umask's;
# * ``SO_PEERCRED`` names the process at the other end, as reported by the kernel;
# * renaming a socket does not change what it leads to: a name that appears after `listen` never refuses;
# * a lock by `flock` belongs to the open file and goes with the last process that has it open, however that
#   ends: an unlocked directory has no process behind it.

BACKLOG = 1024
_PASSING = frozenset({errno.EAGAIN, errno.ECONNABORTED, errno.EINTR, errno.ENOMEM, errno.ENOBUFS})


class Listener:
    """The socket, its directory, and the lock of that; owns all three.

    Parameters
    ----------
    place : int
        Descriptor of the directory, which is locked and holds no socket.
    path : str
        Where it is, to be removed with the socket.
    """

    def __init__(self, place: int, path: str) -> None:
        self._place, self._path = place, path
        os.umask(0o077)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        os.fchdir(place)  # a socket's path has 107 bytes at most, the directory's may have more
        self._socket.bind(DRAFT)
        self._socket.listen(BACKLOG)
        os.rename(DRAFT, SOCKET)
        os.chdir("/")

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self._socket.fileno()

    def accept(self) -> Iterator[socket.socket]:
        """Yield a socket for every process of this user that has connected; others are disconnected unread.

        Raises
        ------
        OSError
            There is no descriptor left for another one.
        """
        while self._socket.fileno() >= 0:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _PASSING:
                    return
                raise
            if peer_of(sock)[1] == os.geteuid():
                yield sock
            else:
                sock.close()

    def close(self) -> None:
        """Remove the names, then release the lock (idempotent)."""
        if self._place < 0:
            return
        self._socket.close()
        try:
            os.unlink(SOCKET, dir_fd=self._place)
            here, there = os.fstat(self._place), os.lstat(self._path)
            if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                os.rmdir(self._path)
        except OSError:
            pass  # another process has removed it, or put something else there
        os.close(self._place)
        self._place = -1


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
            self._refuse(False, f"the supervisor of the world cannot take in a process: {error}")

    def _add_member(self, sock: socket.socket) -> None:
        self._members.append(WorldMember(self._clients, sock, self))

    def _begin(self) -> None:
        self._close_listener()  # removes its names, so that the next world can use them
        for member in [member for member in self._members if member.rank < 0]:
            self._forget(member)  # one too many: it finds no world here, and tries again
        for member in self._members:
            self._clients.admit(member, client_of(member.rank))

    def _refuse(self, late: bool, text: str) -> None:
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
            member.outbox.send(Kind.REFUSED, Refused(late, text).pack())

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
            return
        if frame.kind is Kind.JOIN and member.world is None:
            if len(frame.fds) != 1:
                raise ProtocolError("a JOIN frame that no process of nbparallel sends")
            member.pidfd = frame.fds.pop()
            self._clients.event_loop.add(member.pidfd, lambda: self._on_death(member))
        if (problem := self._world.act_on(member, frame, self._begin)) is not None:
            self._refuse(*problem)

    # going ------------------------------------------------------------------------------------------

    def disconnected(self, member: WorldMember, error: Exception | None) -> None:
        """Act on the end of a member's socket, or disconnect it: its program must not be killed."""
        if error is None and self._world.view is not None:
            self._clients.event_loop.forget(member.socket)  # its pidfd reports the rest, as a rule soon
        else:
            self._lose(member, None)

    def _on_death(self, member: WorldMember) -> None:
        if not is_ready(member.pidfd):
            return  # another one's pidfd had this number a moment ago
        code = exit_code_of(member.pidfd, member.process)
        self._clients.drain(member)  # what it sent before it ended counts, such as LEAVE_WORLD
        self._lose(member, code)

    def _lose(self, member: WorldMember, code: int | None) -> None:
        if member not in self._members:
            return
        self._forget(member)
        if self._world.view is not None:
            self._world.view.write_death(member.rank, code)
            self._clients.end(member)
            self._introduced.end_with(member.number)
        elif member.rank >= 0:
            self._refuse(False, self._world.lost_text(member))

    def _forget(self, member: WorldMember) -> None:
        self._members.remove(member)
        self._clients.forget(member)
        self._clients.event_loop.close(member.pidfd)
        member.pidfd = -1


def main(place: int, first: int, path: str) -> None:
    """Run a world's supervisor over inherited descriptors; the process that calls this exits immediately."""
    if os.fork():
        os._exit(0)
    become_supervisor(place, first)
    ExternalWorld(Listener(place, path), socket.socket(fileno=first)).run()
