"""Polling that survives a want of memory (poll(2): ENOMEM): whoever waits must not die of it."""

from __future__ import annotations

import errno
import select
import time
from pathlib import Path

PAUSE_SECONDS = 0.001
"""Between two tries."""
TRIES = 100
"""Then nothing is there, as far as anybody can tell."""


def ready(poll: select.poll, milliseconds: float | None = None) -> list[tuple[int, int]]:
    """Return what `poll.poll` does, trying again while the system has no memory for the question."""
    for _ in range(TRIES):
        try:
            return poll.poll(milliseconds)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            time.sleep(PAUSE_SECONDS)
    return []


def cgroup_quota() -> float | None:
    """Return how many CPUs' worth of time the container may use, at least 1; None: no limit."""
    try:  # version 2
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1.0, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    try:  # version 1
        base = Path("/sys/fs/cgroup/cpu")
        limit = int((base / "cpu.cfs_quota_us").read_text())
        return None if limit <= 0 else max(1.0, limit / int((base / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        return None
