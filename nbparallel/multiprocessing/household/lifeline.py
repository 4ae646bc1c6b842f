"""A pipe by which the kernel ends guests with their root, also when no supervisor is left to do so.

The root alone has the writing end and never writes; it is closed when that process ends, however it ends.
Each guest has the reading end under an open file of its own, for which it asked for a signal (fcntl(2):
``O_ASYNC``, ``F_SETSIG``): the kernel sends that when the last writing end is closed.  No thread waits.

A parent-death signal would follow the thread that started the child; a pidfd gives no such signal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct

from nbparallel.errors import ChannelClosedError

_F_SETOWN_EX, _F_OWNER_PID, _OWNER = 15, 1, struct.Struct("ii")
"""Of <fcntl.h>.  With a number `fcntl.fcntl` fails within and tries again, which F_SETOWN would have to."""


class ParentSentinel:
    """The ends of the pipe that this process has.

    Parameters
    ----------
    reading : int
        Its reading end; owned.
    writing : int
        In the root its writing end, owned; -1 in a guest.
    """

    def __init__(self, reading: int, writing: int = -1) -> None:
        self._reading, self._writing = reading, writing
        self._inode = os.fstat(reading).st_ino
        self._poll = select.poll()
        self._poll.register(reading, 0)

    def fileno(self) -> int:
        """Return the reading end, a copy of which a process that is started needs; -1: it is not there.

        A program may have closed it, and its number may be that of another file.
        """
        try:
            return self._reading if os.fstat(self._reading).st_ino == self._inode else -1
        except OSError:
            return -1

    def disown(self) -> None:
        """Close the writing end in a process that was forked from the root."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def follow(self, pid: int) -> None:
        """Have this process, whose pid it is, end with the root: `prepared` made this for it.

        Raises
        ------
        ChannelClosedError
            The root has ended already.
        """
        fcntl.fcntl(self._reading, _F_SETOWN_EX, _OWNER.pack(_F_OWNER_PID, pid))
        if self._poll.poll(0):  # it was closed before the signal was asked for, perhaps
            raise ChannelClosedError("the process that started this one's family has ended")

    def close(self) -> None:
        """Close both ends: in the root this ends its guests."""
        self.disown()
        if self.fileno() >= 0:
            os.close(self._reading)


_own: list[ParentSentinel] = []
"""The one whose writing end this process has: at most one."""


def own_lifeline() -> ParentSentinel:
    """Return the one with which this process, as a root, ends its guests; made on first need."""
    if not _own:
        _own.append(ParentSentinel(*os.pipe2(os.O_CLOEXEC)))
    return _own[0]


def close_own_lifeline() -> None:
    """End the guests that are left (idempotent)."""
    while _own:
        _own.pop().close()


def _after_fork() -> None:
    while _own:
        _own.pop().disown()


os.register_at_fork(after_in_child=_after_fork)


def prepared(reading: int) -> ParentSentinel | None:
    """Return what will end a process with the root, once that has called `ParentSentinel.follow`.

    Parameters
    ----------
    reading : int
        A reading end; it stays as it is.

    Returns
    -------
    ParentSentinel or None
        None where the system cannot do that (no /proc): then the supervisor alone ends that process.
    """
    try:
        # A copy is the same open file, whose signal goes to one process.
        own = os.open(f"/proc/self/fd/{reading}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_RDONLY | os.O_NONBLOCK | os.O_ASYNC)
    return ParentSentinel(own)
