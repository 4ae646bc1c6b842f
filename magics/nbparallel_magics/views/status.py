"""``%parallel_status``: the ranks and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nbparallel.errors import grouped, rank_list
from nbparallel.errors.text.table import SHOWN, SHOWN as FOLD, Table, bar
from nbparallel.wire.segments import creator_of
from nbparallel.wire.units import size_column, size_text, time_column

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import RankActivity
    from nbparallel.session.monitoring.segments import SessionNames, SharedSegment
    from nbparallel.session.monitoring.statistics import SessionStatistics

# ``%parallel_segments``: every segment of the session.

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
        places = grouped(
            (seen.segment, rank)
            for rank, seen in record.ranks.items()
            if seen.origin is not Origin.SHARED and seen.segment
        )
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


# ``%parallel_cluster``: the hosts of a session on a cluster, as a table.


def hosts_table(hosts: Mapping[str, range], activity: Sequence[RankActivity] = ()) -> Table:
    """Return a row for each host with its ranks; `activity`: what these do, if they run."""
    count = sum(map(len, hosts.values()))
    unseen = {rank.host: rank.operation for rank in activity if rank.state == "unseen"}
    rows = [(host, rank_list(ranks).partition(" ")[2], unseen.get(host, "")) for host, ranks in hosts.items()]
    size = f"{count} rank{'s' * (count != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"
    foot = "-r @name runs a cell on the ranks of one host"
    return Table(size, ("host", "ranks", "problem"), rows, foot).without_empty_columns()


_TIMES = ("computing", "waiting", "moving")


def status_table(seen: SessionStatistics) -> Table:
    """Return a row for each rank, and below them what is shared, of how much."""
    from nbparallel.wire.messages import MOST_FRAME_NBYTES  # a third of the time of `%load_ext`

    ranks = seen.ranks
    states = Counter(rank.state for rank in ranks)
    took_part = [any(getattr(rank, kind) for kind in _TIMES) for rank in ranks]
    columns = {
        "rank": [str(rank.rank) for rank in ranks],
        "host": [rank.host for rank in ranks],
        "state": [rank.state * (len(states) > 1) for rank in ranks],
        "in": [f"{r.operation}, line {r.line}" if r.operation and r.line else r.operation for r in ranks],
    }
    unit, times = time_column([getattr(rank, kind) for kind in _TIMES for rank in ranks])
    for i, kind in enumerate(_TIMES):
        of_kind = times[i * len(ranks) :]
        columns[f"{kind} ({unit})"] = [t * took for t, took in zip(of_kind, took_part, strict=False)]
    columns["operations"] = [
        "" if rank.operations is None else f"{rank.operations:,}" * took
        for rank, took in zip(ranks, took_part, strict=True)
    ]
    for what, sizes in (
        ("own memory", [rank.private_nbytes for rank in ranks]),
        ("shared pages", [rank.mapped_nbytes for rank in ranks]),
    ):
        unit, texts = size_column(sizes)
        columns[f"{what} ({unit})"] = [t * bool(r.pid) for t, r in zip(texts, ranks, strict=True)]
    columns["threads"] = [str(rank.threads) * bool(rank.pid) for rank in ranks]
    columns["pid"] = [str(rank.pid or "") for rank in ranks]
    where = " on each host" * any(rank.host for rank in ranks)
    room = "" if seen.free_nbytes is None else f", {size_text(seen.free_nbytes)} more would fit{where}"
    kept = (
        f"; frames of failed cells, for %debug, hold {size_text(seen.frames_nbytes)}: each rank's at most "
        f"{size_text(MOST_FRAME_NBYTES)}, until its next cell"
    ) * bool(seen.frames_nbytes)
    many = f"{len(ranks)} rank{'s' * (len(ranks) != 1)}"
    return Table(
        f"{many}: {', '.join(f'{n} {state}' if n < len(ranks) else state for state, n in states.items())}",
        tuple(columns),
        list(zip(*columns.values(), strict=True)),
        f"shared memory ({seen.strategy}): {total(seen)}{room}; open files of the notebook: "
        f"{seen.descriptors} of {seen.descriptor_limit}{kept}",
        f"started by {seen.start_method}" + "; times and operations are of the last cell" * any(took_part),
        f"{len(ranks) - SHOWN} more ranks" * (len(ranks) > SHOWN),
    ).without_empty_columns()
