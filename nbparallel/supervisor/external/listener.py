"""The listening socket to which processes that nbparallel did not start connect for their supervisor.

It is open only until all have connected; then nothing of it has a name any more.

Some facts about named Unix sockets (unix(7), socket(7), flock(2)):

* connecting needs the right to enter the directory and to write to the socket; its mode comes from the umask;
* ``SO_PEERCRED`` names the process at the other end, as reported by the kernel;
* renaming a socket does not change what it leads to: a name that appears after `listen` never refuses;
* a lock by `flock` belongs to the open file and goes with the last process that has it open, however that
  ends: an unlocked directory has no process behind it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

from nbparallel.wire.identity import peer_of

SOCKET, DRAFT = "socket", "socket.new"
"""Names in the directory where processes meet."""
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
