"""SegmentList: the segments that a process uses, as a sequence that prints as a table."""

from __future__ import annotations

from nbparallel.errors.text.table import Table, TableView
from nbparallel.sharing.lifecycle.segment import SegmentStatistics
from nbparallel.wire.units import size_text

SHOWN = 50
"""Rows of the printed table; the sequence itself is complete."""


class SegmentList(TableView, tuple[SegmentStatistics, ...]):
    """Records of segments; compares and iterates as the tuple that it is."""

    __slots__ = ()

    def table(self) -> Table:
        """Return a row for each segment in use, the largest first, and a line about what is kept."""
        used = sorted((s for s in self if s.phase != "pooled"), key=lambda s: -s.nbytes)
        named = any(record.path for record in used[:SHOWN])
        rows = [
            (
                f"{record.segment:#x}",
                record.strategy,
                size_text(record.nbytes),
                record.phase,
                "here" if record.own else "elsewhere",
                _writers(record),
                *([record.path] if named else ()),
            )
            for record in used[:SHOWN]
        ]
        total = size_text(sum(record.nbytes for record in used))
        return Table(
            f"shared memory of this process: {segments_text(len(used))}, {total}",
            ("segment", "strategy", "size", "phase", "made", "may be written", *(["name"] if named else ())),
            rows,
            "\n".join(line for line in (left_out(used), self._kept()) if line),
        )

    def _kept(self) -> str:
        pooled = [record.nbytes for record in self if record.phase == "pooled"]
        return kept_text(sum(pooled), len(pooled)) if pooled else ""


def segments_text(count: int) -> str:
    """Return ``1 segment``, ``2 segments``.

    >>> segments_text(1), segments_text(0)
    ('1 segment', '0 segments')
    """
    return f"{count} segment{'s' * (count != 1)}"


def kept_text(nbytes: int, count: int = 0) -> str:
    """Return the line about memory that is kept for the next arrays."""
    where = f" in {segments_text(count)}" if count else ""
    return f"kept for the next arrays: {size_text(nbytes)}{where}; returned to the system after a while"


def left_out(used: list[SegmentStatistics]) -> str:
    """Return a line about the smallest, if there are too many to be shown."""
    rest = used[SHOWN:]
    return f"… and {len(rest):,} smaller ones, {size_text(sum(s.nbytes for s in rest))}" if rest else ""


def _writers(record: SegmentStatistics) -> str:
    if record.read_only:
        return "by none"
    if record.own:
        return "by every process" if record.writable else "here only"
    return "here too" if record.writable else "not here"
