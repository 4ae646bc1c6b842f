"""Orphans of a session whose supervisor is dead: processes that user code on its ranks started.

While the supervisor lives it ends them itself (it is a subreaper).  Afterwards they are found by the
session's mark in their environment, which holds 50 random bits.
"""

from __future__ import annotations

import time

from nbparallel.supervisor.process_table import environment, kill_where

LIMIT_SECONDS = 1.0
"""How long new ones (a killed process's children) are looked for."""


def kill_by_session_mark(session: str) -> None:
    """Kill every process of this session, and theirs, until there is none."""
    mark = f"NBP_SESSION={session}".encode()
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and kill_where(lambda pid: mark in environment(pid))[0]:
        time.sleep(0.005)  # a bounded poll: killed processes take a moment to leave /proc
