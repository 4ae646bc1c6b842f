"""How much processor time a container may use."""

from __future__ import annotations

from pathlib import Path


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
