"""Rank: what the supervisor knows of one rank's process."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from nbparallel.supervisor.outbox import Outbox


@dataclass(slots=True)
class Rank:
    """A rank's process, from SPAWN to its death."""

    rank: int
    client: int
    socket: socket.socket
    outbox: Outbox
    pid: int = 0
    announced: bool = False
    dead: bool = False
    template: int = 0
    inode: int = 0
    """Of its end of the segment socket, which what it forks has open too."""
    nonsense: str = ""
    """What it sent that is no message; it is ended for that."""
    pidfd: int = -1
    """Readable when it has ended, whether SIGCHLD came or not; -1: there is none yet, or no more."""

    def give_pidfd(self) -> int:
        """Return the pidfd, which is the caller's from now on; -1 if there is none."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd
