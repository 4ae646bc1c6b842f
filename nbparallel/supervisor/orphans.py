"""Orphans: processes that user code on a rank had started, and whose rank is dead.

Whatever a rank started becomes the supervisor's child when its own parents have ended (a subreaper adopts).
Its rank is known by what a process cannot easily lose, even after ``setsid`` and two forks:

* its process group (setpgid(2)) is the one that the rank led; or
* it was executed, and its environment names the rank's client number; or
* it was only forked, and has the rank's end of a socket open: exec closes it, fork does not.

A child's pid is not reused before it has been reaped, so the process that was inspected is the one killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from dataclasses import dataclass

from nbparallel.supervisor import children
from nbparallel.supervisor.children import descriptors, environment, kill_where
from nbparallel.wire.identity import Process, has_ended, process_of, process_state, this_process

SESSION, CLIENT, OWNER = "NBP_SESSION", "NBP_CLIENT", "NBP_OWNER"
"""Environment variables of every process below a session: its id, its rank's client number, its owner."""


@dataclass(frozen=True, slots=True)
class _Dead:
    pid: int
    marks: frozenset[bytes]
    socket: str


def mark_children(notebook: int) -> None:
    """Mark every process below this one, the supervisor, with its owner, by an environment variable."""
    owners = (process_of(notebook), this_process())
    os.environ[OWNER] = " ".join([_namespaces(), *(f"{owner.pid}:{owner.started}" for owner in owners)])


def _namespaces() -> str:
    """Return where pids and start times mean what they mean here; empty where the system does not say."""
    try:
        return ":".join(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "time"))
    except OSError:
        return ""


class Orphans:
    """The dead ranks of one session, and the processes that they left running."""

    def __init__(self) -> None:
        self._dead: list[_Dead] = []

    def rank_died(self, session: str, client: int, pid: int, inode: int) -> None:
        """Record the death of a rank; `inode` is that of its segment socket."""
        marks = frozenset({f"{SESSION}={session}".encode(), f"{CLIENT}={client}".encode()})
        self._dead.append(_Dead(pid, marks, f"socket:[{inode}]"))

    def forget_pid(self, pid: int) -> None:
        """Record that a pid of a dead rank was reused."""
        self._dead = [dead for dead in self._dead if dead.pid != pid]

    def end(self, living: Collection[int]) -> None:
        """Kill the children that dead ranks left; call it whenever a child has ended."""
        if not self._dead:
            return
        for pid in children.children():
            if pid not in living and self._is_orphan_of_rank(pid):
                os.kill(pid, signal.SIGKILL)

    def _is_orphan_of_rank(self, pid: int) -> bool:
        state = process_state(pid)
        if state is None or state.letter in "ZX":
            return False
        if any(state.group == dead.pid for dead in self._dead):
            return True
        variables = environment(pid)
        if any(dead.marks <= variables for dead in self._dead):
            return True
        sockets = descriptors(pid)
        return any(dead.socket in sockets for dead in self._dead)


def orphans_text(count: int) -> str:
    """Return the line about orphans that were ended; empty if there were none."""
    if not count:
        return ""
    return f"ended {count} process{'es' if count > 1 else ''} that a killed session had left running"


def end_orphans() -> int:
    """Kill the processes of sessions whose notebook and supervisor are dead for sure; return how many.

    Their environment names both.
    """
    return kill_where(_is_orphan)[1]


def _is_orphan(pid: int) -> bool:
    mark = f"{OWNER}=".encode()
    for variable in environment(pid):
        if variable.startswith(mark):
            place, *owners = os.fsdecode(variable[len(mark) :]).split(" ")
            return bool(place and owners) and place == _namespaces() and all(map(_has_ended, owners))
    return False


def _has_ended(owner: str) -> bool:
    pid, _, started = owner.partition(":")
    return pid.isdecimal() and started.isdecimal() and has_ended(Process(int(pid), int(started)))
