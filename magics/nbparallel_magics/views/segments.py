"""``%parallel_segments``: every segment of the session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nbparallel.errors import rank_list
from nbparallel.errors.text.table import Table
from nbparallel.wire.units import size_text

if TYPE_CHECKING:
    from nbparallel.session.monitoring.statistics import SessionStatistics
    from nbparallel.session.monitoring.who import SessionNames

SHOWN = 50
"""Rows of the table; `Session.statistics` has all."""
_NAMES = 4
"""Names that are shown of one segment."""


def segments_table(seen: SessionStatistics, names: SessionNames) -> Table:
    """Return a row for each segment of a session, the largest first, and below them the sums.

    `names` has those on idle ranks.
    """
    from nbparallel_widgets.panel_memory import NO_NAME, used_by  # not when the extension is loaded

    of_ranks = _names_of_ranks(names)
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
        "\n".join(_foot(seen, no_name=NO_NAME if any(row[0] == NO_NAME for row in rows) else "")),
    ).without_empty_columns()


def _names_of_ranks(names: SessionNames) -> dict[int, list[str]]:
    """Return the names of memory in each segment that is no array of this notebook's, with the ranks."""
    from nbparallel.wire.inspection import Origin

    found: dict[int, list[str]] = {}
    for record in names.names:
        places: dict[int, list[int]] = {}
        for rank, seen in record.ranks.items():
            if seen.origin is not Origin.SHARED and seen.segment:
                places.setdefault(seen.segment, []).append(rank)
        for segment, ranks in places.items():
            found.setdefault(segment, []).append(f"{record.name} ({rank_list(ranks)})")
    return found


def _foot(seen: SessionStatistics, *, no_name: str) -> Iterator[str]:
    from nbparallel.sharing.arrays import kept_text

    if no_name:
        yield (
            f"{no_name}: the data of a copied object, an array in a list or an object, or what operations "
            "between ranks work in"
        )
    if rest := seen.segments[SHOWN:]:
        yield f"… and {len(rest):,} smaller ones, {size_text(sum(record.nbytes for record in rest))}"
    if seen.pooled_nbytes:
        yield kept_text(seen.pooled_nbytes)
    if seen.free_nbytes is not None:
        yield f"{size_text(seen.free_nbytes)} more would fit"
    if not seen.ledger_answered:
        yield "the supervisor did not answer within a second: the list of users is not complete"


def total(seen: SessionStatistics) -> str:
    """Return how much is shared, in how many segments."""
    from nbparallel.sharing.arrays import segments_text

    return f"{size_text(seen.shared_nbytes)} in {segments_text(seen.shared_segments)}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
