"""Lifeline: a pipe by which the kernel ends guests with their root, also when no supervisor is left to do so.

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

from nbparallel.errors import ChannelClosedError


class Lifeline:
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

    def close(self) -> None:
        """Close both ends: in the root this ends its guests."""
        self.disown()
        if self.fileno() >= 0:
            os.close(self._reading)


_own: list[Lifeline] = []
"""The one whose writing end this process has: at most one."""


def own_lifeline() -> Lifeline:
    """Return the one with which this process, as a root, ends its guests; made on first need."""
    if not _own:
        _own.append(Lifeline(*os.pipe2(os.O_CLOEXEC)))
    return _own[0]


def close_own_lifeline() -> None:
    """End the guests that are left (idempotent)."""
    while _own:
        _own.pop().close()


def _after_fork() -> None:
    while _own:
        _own.pop().disown()


os.register_at_fork(after_in_child=_after_fork)


def follow(copy: int) -> Lifeline | None:
    """Have this process end with the root.

    Parameters
    ----------
    copy : int
        Copy of the reading end; closed in any case.

    Returns
    -------
    Lifeline or None
        None where the system cannot do that (no /proc): then the supervisor alone ends this process.

    Raises
    ------
    ChannelClosedError
        The root has ended already.
    """
    try:
        # A copy is the same open file, whose signal goes to one process.
        mine = os.open(f"/proc/self/fd/{copy}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        os.close(copy)
        return None
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(mine, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(mine, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(mine, fcntl.F_SETFL, fcntl.fcntl(mine, fcntl.F_GETFL) | os.O_ASYNC)
        if _hung_up(copy):  # before the signal was asked for, perhaps
            raise ChannelClosedError("the process that started this one's family has ended")
    except BaseException:
        os.close(mine)
        raise
    finally:
        os.close(copy)
    return Lifeline(mine)


def _hung_up(end: int) -> bool:
    poll = select.poll()
    poll.register(end, 0)
    return bool(poll.poll(0))
