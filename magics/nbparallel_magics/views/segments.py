"""``%parallel_segments``: every segment of the session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbparallel.errors import rank_list
from nbparallel.errors.text.table import Table, TableView
from nbparallel.wire.units import size_text

if TYPE_CHECKING:
    from nbparallel.session.monitoring.statistics import SessionStatistics
    from nbparallel.session.monitoring.who import SessionNames

SHOWN = 50
"""Rows of the table; `Session.statistics` has all."""
_NAMES = 4
"""Names that are shown of one segment."""


@dataclass(frozen=True, slots=True, repr=False)
class SegmentsView(TableView):
    """The shared memory of a session as a notebook shows it."""

    statistics: SessionStatistics
    """From `Session.statistics`."""
    names: SessionNames
    """From `Session.who`: the names on idle ranks."""

    def table(self) -> Table:
        """Return one row for each segment, the largest first, and below them the sums."""
        from nbparallel_widgets.panel_memory import NO_NAME, used_by  # not when the extension is loaded

        seen, of_ranks = self.statistics, self._names_of_ranks()
        rows = [
            (
                _names([*record.names, *of_ranks.get(record.segment, ())]) or NO_NAME,
                record.host,
                size_text(record.nbytes),
                used_by(record),
                "no rank" if record.read_only else "every process" if record.writable else record.maker,
                record.strategy or "?",
                record.maker,
                record.phase,
                f"{record.segment & (1 << 64) - 1:#x}",
            )
            for record in seen.segments[:SHOWN]
        ]
        return Table(
            f"shared memory of this session: {total(seen)}",
            ("names", "host", "size", "used by", "written by", "strategy", "made by", "phase", "segment"),
            rows,
            "\n".join([*_no_name_line(rows), *self._foot()]),
        ).without_empty_columns()

    def _names_of_ranks(self) -> dict[int, list[str]]:
        """Return the names of memory in each segment that is no array of this notebook's, with the ranks."""
        from nbparallel.wire.inspection import Origin

        found: dict[int, list[str]] = {}
        for record in self.names.names:
            places: dict[int, list[int]] = {}
            for rank, seen in record.ranks.items():
                if seen.origin is not Origin.SHARED and seen.segment:
                    places.setdefault(seen.segment, []).append(rank)
            for segment, ranks in places.items():
                found.setdefault(segment, []).append(f"{record.name} ({rank_list(ranks)})")
        return found

    def _foot(self) -> list[str]:
        from nbparallel.sharing.arrays import kept_text

        seen = self.statistics
        lines = []
        if rest := seen.segments[SHOWN:]:
            nbytes = size_text(sum(record.nbytes for record in rest))
            lines.append(f"… and {len(rest):,} smaller ones, {nbytes}")
        if seen.pooled_nbytes:
            lines.append(kept_text(seen.pooled_nbytes))
        if seen.free_nbytes is not None:
            lines.append(f"{size_text(seen.free_nbytes)} more would fit")
        if not seen.ledger_answered:
            lines.append("the supervisor did not answer within a second: the list of users is not complete")
        return lines


def total(seen: SessionStatistics) -> str:
    """Return how much is shared, in how many segments."""
    from nbparallel.sharing.arrays import segments_text

    return f"{size_text(seen.shared_nbytes)} in {segments_text(seen.shared_segments)}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def _no_name_line(rows: Sequence[tuple[str, ...]]) -> list[str]:
    from nbparallel_widgets.panel_memory import NO_NAME

    if all(row[0] != NO_NAME for row in rows):
        return []
    return [
        f"{NO_NAME}: the data of a copied object, an array in a list or an object, or what operations "
        "between ranks work in"
    ]
