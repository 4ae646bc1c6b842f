"""``%parallel_segments``: every segment of the session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbparallel.errors import rank_list
from nbparallel.text.table import Table, TableView
from nbparallel.wire.inspection import Origin
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
        from nbparallel_widgets.panel_memory import used_by  # not when the extension is loaded

        seen, of_ranks = self.statistics, self._names_of_ranks()
        rows = [
            (
                f"{record.segment:#x}",
                record.strategy or "?",
                size_text(record.nbytes),
                _names([*record.names, *of_ranks.get(record.segment, ())]),
                used_by(record),
                record.maker,
                record.phase,
                "no rank" if record.read_only else "every rank" if record.writable else "its creator",
            )
            for record in seen.segments[:SHOWN]
        ]
        return Table(
            f"shared memory of this session: {total(seen)}",
            ("segment", "strategy", "size", "names", "used by", "made by", "phase", "written by"),
            rows,
            "\n".join(self._foot()),
        )

    def _names_of_ranks(self) -> dict[int, list[str]]:
        """Return the names that ranks gave to memory in each segment, with the ranks."""
        found: dict[int, list[str]] = {}
        for record in self.names.names:
            places: dict[int, list[int]] = {}
            for rank, seen in record.ranks.items():
                if seen.origin is Origin.OWN and seen.segment:
                    places.setdefault(seen.segment, []).append(rank)
            for segment, ranks in places.items():
                found.setdefault(segment, []).append(f"{record.name} ({rank_list(ranks)})")
        return found

    def _foot(self) -> list[str]:
        from nbparallel.sharing.segment_list import kept_text

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
    from nbparallel.sharing.segment_list import segments_text

    return f"{size_text(seen.shared_nbytes)} in {segments_text(seen.shared_segments)}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
