"""The process table, as ``/proc`` shows it: pids, environments, open descriptors; and killing without a race.

Standard library only: the supervisor uses it, and the session when the supervisor is dead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def pids() -> list[int]:
    """Return the pids of all visible processes; none without /proc."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def environment(pid: int) -> frozenset[bytes]:
    """Return the environment that a process was executed with; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return frozenset(file.read().split(b"\0"))
    except OSError:
        return frozenset()


def descriptors(pid: int) -> frozenset[str]:
    """Return what the open descriptors of a process refer to."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        pass  # the process exited, or closed one, while it was read
    return frozenset(found)


def kill_where(matches: Callable[[int], bool]) -> tuple[int, int]:
    """Kill every process but this one whose pid `matches`.

    The pidfd is opened before the process is checked again, so that a reused pid is never signalled.

    Returns
    -------
    found, killed : int
        How many matched, and how many of them got SIGKILL.
    """
    found = killed = 0
    for pid in pids():
        if pid == os.getpid() or not matches(pid):
            continue
        found += 1
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # it has exited, or there are no descriptors left
        try:
            if matches(pid):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed += 1
        except OSError:
            pass  # it has exited, or belongs to another user
        finally:
            os.close(pidfd)
    return found, killed
