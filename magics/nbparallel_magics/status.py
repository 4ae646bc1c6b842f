"""``%parallel_status``: the ranks and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbparallel_magics.table import Table

if TYPE_CHECKING:
    from nbparallel.session.statistics import SessionStatistics


@dataclass(frozen=True, slots=True)
class StatusTable:
    """A snapshot of a session as a notebook shows it."""

    statistics: SessionStatistics
    """From `Session.statistics`."""

    def table(self) -> Table:
        """Return one row for each rank."""
        seen = self.statistics
        rows = [
            (
                str(rank.rank),
                str(rank.pid),
                rank.state,
                f"{rank.rss_nbytes / 1e6:.0f} MB",
                str(rank.threads),
            )
            for rank in seen.ranks
        ]
        return Table(
            f"{len(rows)} rank{'s' * (len(rows) != 1)}, sharing strategy {seen.strategy}",
            ("rank", "pid", "state", "memory", "threads"),
            rows,
        )

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()
