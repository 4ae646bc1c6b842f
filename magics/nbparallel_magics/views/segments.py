"""``%parallel_segments``: every segment of the session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nbparallel.errors import rank_list
from nbparallel.errors.text.table import SHOWN as FOLD
from nbparallel.errors.text.table import Table, bar
from nbparallel.wire.segments import creator_of
from nbparallel.wire.units import size_column, size_text

if TYPE_CHECKING:
    from nbparallel.session.monitoring.segments import SharedSegment
    from nbparallel.session.monitoring.statistics import SessionStatistics
    from nbparallel.session.monitoring.who import SessionNames

MOST = 50
"""Rows of the table; ``--all`` and `Session.statistics` have all."""
_NAMES = 4
"""Names that are shown of one segment."""


def segments_table(seen: SessionStatistics, names: SessionNames, *, internals: bool = False) -> Table:
    """Return a row for each segment of a session, the largest first, and below them the sums.

    `names` has those on idle ranks.  What each rank has by itself under one name is one row, unless ids and
    phases are wanted (`internals`).
    """
    from nbparallel_widgets.panel_memory import NO_NAME, used_by  # not when the extension is loaded

    of_ranks = _names_of_ranks(names)
    strategies, makers = ({getattr(s, what) for s in seen.segments} for what in ("strategy", "maker"))
    groups: dict[tuple[str, ...], list[SharedSegment]] = {}
    for record in seen.segments:
        own = not internals and [f"rank {rank}" for rank in record.ranks] == [record.maker]
        row = (
            _names([*record.names, *of_ranks.get(record.segment, ())]) or NO_NAME,
            record.host,
            "" if own and not record.notebook else used_by(record),
            "no process" if record.read_only else "all" if record.writable else record.maker,
            (record.strategy or "?") * (internals or len(strategies) > 1),
            ("itself" if own else record.maker) * (internals or len(makers) > 1),
            record.phase * internals,
            f"{record.segment & (1 << 64) - 1:#x}" * internals,
        )
        groups.setdefault(row, []).append(record)
    most = len(groups) if internals else MOST
    found = sorted(groups.items(), key=lambda group: -_nbytes(group[1]))
    unit, texts = size_column([_nbytes(records) for _, records in found])
    rows = [
        (
            f"{name} in {len(records)} segments" if len(records) > 1 else name,
            host,
            text,
            bar(_nbytes(records) / (_nbytes(found[0][1]) or 1)),
            users or rank_list(rank for record in records for rank in record.ranks),
            *rest,
        )
        for ((name, host, users, *rest), records), text in zip(found[:most], texts, strict=False)
    ]
    notes = [] if internals else [f"all {name}" for name in strategies if len(strategies) == 1]
    notes += [] if internals else [f"made by {maker}" for maker in makers if len(makers) == 1]
    if seen.free_nbytes is not None:
        notes.append(f"{size_text(seen.free_nbytes)} more would fit")
    if seen.pooled_nbytes:
        notes.append(f"{size_text(seen.pooled_nbytes)} kept for the next arrays")
    cut = len(found) > most
    rest = [record for _, records in found[FOLD:] for record in records]
    return Table(
        f"shared memory: {total(seen)}",
        ("array", "host", unit, "size", "used by", "may write", "strategy", "made by", "phase", "segment"),
        rows,
        "\n".join(_foot(seen, no_name=NO_NAME if any(row[0].startswith(NO_NAME) for row in rows) else "")),
        " · ".join(notes),
        (
            f"{len(found) - FOLD:,} more, {size_text(_nbytes(rest))}"
            + f", the largest {most - FOLD} here" * cut
        )
        * (len(rows) > FOLD),
    ).without_empty_columns()


def _nbytes(records: Sequence[SharedSegment]) -> int:
    return sum(record.nbytes for record in records)


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
            other = creator_of(segment) == 0 or len(ranks) > 1
            found.setdefault(segment, []).append(record.name + f" ({rank_list(ranks)})" * other)
    return found


def _foot(seen: SessionStatistics, *, no_name: str) -> Iterator[str]:
    if no_name:
        yield (
            f"{no_name}: the data of a copied object, an array in a list or an object, or what operations "
            "between ranks work in"
        )
    if not seen.ledger_answered:
        yield "the supervisor did not answer within a second: the list of users is not complete"


def total(seen: SessionStatistics) -> str:
    """Return how much is shared, in how many segments."""
    from nbparallel.sharing.arrays import segments_text

    return f"{size_text(seen.shared_nbytes)} in {segments_text(seen.shared_segments)}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
