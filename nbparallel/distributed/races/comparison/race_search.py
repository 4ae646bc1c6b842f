"""Search for races in the logs of all ranks of a checked cell."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nbparallel.distributed.races.access_log import AccessLog, ArrayName
from nbparallel.distributed.races.comparison.array_names import ArrayNames
from nbparallel.distributed.races.comparison.folding import fold_conflicts
from nbparallel.distributed.races.comparison.joined_logs import JoinedLogs
from nbparallel.distributed.races.comparison.race_report import RaceReport
from nbparallel.distributed.races.comparison.sentences import ranks_text
from nbparallel.distributed.races.comparison.walk import Walk

MOST_NAMES = 3
"""Arrays of one segment that are named."""


def compare(
    logs: Iterable[AccessLog], names: Iterable[ArrayName] = (), lost: Collection[int] = ()
) -> RaceReport:
    """Return the data races of a cell.

    Parameters
    ----------
    logs : iterable of AccessLog
        Of all ranks, in any order; a rank can have several, one continuing the other.
    names : iterable of ArrayName
        The notebook's names; they are preferred to those of the ranks.
    lost : collection of int
        Ranks whose logs do not reach to the end of the cell.
    """
    found = JoinedLogs(logs)
    array_names = ArrayNames(names, found.ranks)
    walk = Walk(found.ranks, found.contended, array_names.part_of)
    walk.run()
    numbers = [log.rank for log in found.ranks]
    return RaceReport(
        races=fold_conflicts(walk.conflicts.values(), numbers, found.sites, array_names),
        accesses=sum(log.count for log in found.ranks),
        not_checked=(
            *_lost(lost),
            *_incomplete(walk.incomplete, array_names),
            *(["the rest of the cell, because too many accesses are in no order"] * walk.is_cut_short),
        ),
    )


def _lost(ranks: Collection[int]) -> list[str]:
    its = "its" if len(ranks) == 1 else "their"
    return [f"what {ranks_text(ranks)} did: {its} log was lost"] if ranks else []


def _incomplete(segments: Iterable[int], names: ArrayNames) -> list[str]:
    """Return a line for each segment with too many irregular accesses."""
    lines = []
    for segment in sorted(segments):
        arrays = [f"`{array.name}`" for array in names.touching(segment, 0, 1 << 62)][:MOST_NAMES]
        where = " or ".join(arrays) or "a shared array without a name"
        lines.append(f"some pairs of accesses to {where}, because too many touch scattered elements")
    return lines
