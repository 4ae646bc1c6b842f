"""Ending what ranks had started, when the supervisor is gone.

While the supervisor lives it does this itself (it is a subreaper).  If it was killed, processes that user
code on a rank started would live on; they are found by the session's mark in their environment, which
holds 50 random bits, and signalled by pidfd, so that a reused pid is never hit.
"""

from __future__ import annotations

import os
import signal
import time

LIMIT_SECONDS = 1.0
"""How long new ones (a killed process's children) are looked for."""


def marked(session: str) -> list[int]:
    """Return the pids of processes of this session, except our own."""
    mark = f"NBP_SESSION={session}".encode()
    return [pid for pid in _pids() if pid != os.getpid() and _has(pid, mark)]


def end_marked(session: str) -> None:
    """Kill every process of this session, and theirs, until there is none."""
    mark = f"NBP_SESSION={session}".encode()
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        pids = marked(session)
        if not pids:
            return
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                if _has(pid, mark):  # still the same process: the pidfd was opened before this look
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone meanwhile
            finally:
                os.close(pidfd)
        time.sleep(0.005)  # a bounded poll: killed processes take a moment to leave /proc


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def _has(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False
