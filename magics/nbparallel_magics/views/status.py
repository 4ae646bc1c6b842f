"""``%parallel_status``: the ranks and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nbparallel.errors import rank_list
from nbparallel.errors.text.table import SHOWN, Table
from nbparallel.wire.messages import MOST_FRAME_NBYTES
from nbparallel.wire.units import size_column, size_text, time_column
from nbparallel_magics.views.segments import total

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import RankActivity
    from nbparallel.session.monitoring.statistics import SessionStatistics

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
