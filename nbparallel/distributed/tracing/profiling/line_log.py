"""What one rank reports of the lines of a cell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LineLog:
    """The time of each line on one rank."""

    rank: int
    """Its number."""
    lines: tuple[tuple[str, int, int, int, int], ...]
    """File, line, nanoseconds in all, and of them waiting and moving; no file: between the lines."""
    texts: dict[str, tuple[str, tuple[str, ...]]]
    """Of each file what it is called (empty: the cell that ran), and its lines."""
    remark: str
    """What could not be seen."""
