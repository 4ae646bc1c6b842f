"""``%parallel_cluster``: the hosts of a session on a cluster, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nbparallel.errors import rank_list
from nbparallel.errors.text.table import Table

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import RankActivity


def hosts_table(hosts: Mapping[str, range], activity: Sequence[RankActivity] = ()) -> Table:
    """Return a row for each host with its ranks; `activity`: what these do, if they run."""
    count = sum(map(len, hosts.values()))
    unseen = {rank.host: rank.operation for rank in activity if rank.state == "unseen"}
    rows = [(host, rank_list(ranks).partition(" ")[2], unseen.get(host, "")) for host, ranks in hosts.items()]
    size = f"{count} rank{'s' * (count != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"
    foot = "-r @name runs a cell on the ranks of one host"
    return Table(size, ("host", "ranks", "problem"), rows, foot).without_empty_columns()
