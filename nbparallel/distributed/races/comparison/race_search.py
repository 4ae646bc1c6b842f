"""Search for races in the logs of all ranks of a checked cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from nbparallel.distributed.races.access_log import AccessLog, ArrayName
from nbparallel.distributed.races.comparison.array_names import ArrayNames
from nbparallel.distributed.races.comparison.folding import fold_conflicts
from nbparallel.distributed.races.comparison.joined_logs import JoinedLogs, RankLog
from nbparallel.distributed.races.comparison.race_report import RaceReport
from nbparallel.distributed.races.comparison.sentences import ranks_text
from nbparallel.distributed.races.comparison.walk import Walk

MOST_NAMES = 3
"""Arrays on one page that are named."""


def compare(logs: Iterable[AccessLog], names: Iterable[ArrayName] = ()) -> RaceReport:
    """Return the data races of a cell.

    Parameters
    ----------
    logs : iterable of AccessLog
        Of all ranks, in any order; a rank can have several, one continuing the other.
    names : iterable of ArrayName
        The notebook's names; they are preferred to those of the ranks.
    """
    found = JoinedLogs(logs)
    array_names = ArrayNames(names, found.ranks)
    walk = Walk(found.ranks, found.contended, array_names.part_of)
    walk.run()
    numbers = [log.rank for log in found.ranks]
    refused = (log.refused for log in found.ranks)
    return RaceReport(
        races=fold_conflicts(walk.conflicts.values(), numbers, found.sites, array_names),
        accesses=sum(log.count for log in found.ranks),
        not_checked=(
            *_unexplained(found.ranks, array_names),
            *_incomplete(walk.incomplete, array_names),
            *(["the rest of the cell, because too many accesses are in no order"] * walk.is_cut_short),
        ),
        refused=next(filter(None, refused), ""),
    )


def _unexplained(logs: Iterable[RankLog], names: ArrayNames) -> list[str]:
    """Return a line for each array, or arrays that share a page, in which bytes changed without an access."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for log in logs:
        ranges: dict[tuple[int, tuple[str, ...]], tuple[int, int]] = {}
        for segment, start, stop in log.unexplained:
            touched = tuple(array.name for array in names.touching(segment, start, stop))
            low, high = ranges.get((segment, touched), (start, stop))
            ranges[segment, touched] = min(low, start), max(high, stop)
        for (segment, _), (start, stop) in ranges.items():
            ranks[_written_bytes(names, segment, start, stop)].append(log.rank)
    return [
        f"{ranks_text(found)} wrote {what} in a way that numpy does not show (numba, a C library?)"
        for what, found in ranks.items()
    ]


def _written_bytes(names: ArrayNames, segment: int, start: int, stop: int) -> str:
    """Name the arrays on some pages; one alone with the part of it that lies there."""
    arrays = names.touching(segment, start, stop)
    if not arrays:
        return "a shared array without a name"
    if len(arrays) > 1:
        shown = [f"`{array.name}`" for array in arrays[:MOST_NAMES]]
        rest = len(arrays) - len(shown)
        return f"{' or '.join(shown)}{f', or one of {rest} more arrays beside them,' * (rest > 0)}"
    (array,) = arrays
    part = array.written(array.around(max(start, array.start), min(stop, array.stop)))
    return f"`{array.name}` (within `{part}`)" if part != array.name else f"`{array.name}`"


def _incomplete(segments: Iterable[int], names: ArrayNames) -> list[str]:
    """Return a line for each segment with too many irregular accesses."""
    lines = []
    for segment in sorted(segments):
        arrays = [f"`{array.name}`" for array in names.touching(segment, 0, 1 << 62)][:MOST_NAMES]
        where = " or ".join(arrays) or "a shared array without a name"
        lines.append(f"some pairs of accesses to {where}, because too many touch scattered elements")
    return lines
