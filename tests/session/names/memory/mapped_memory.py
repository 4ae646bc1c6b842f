"""What a process maps, seen from outside, and a wait that does nothing which could help."""

from __future__ import annotations

from pathlib import Path


def mapped(pid: int | str = "self") -> int:
    """Return how many bytes of segments a process maps, without asking it."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:nbp-" in line and "control" not in line:
            begin, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(begin, 16)
    return total
