"""``%parallel_cluster``: the hosts of a session on a cluster, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbparallel.errors import rank_list
from nbparallel.errors.text.table import Table, TableView

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import RankActivity


@dataclass(frozen=True, slots=True, repr=False)
class HostsView(TableView):
    """The hosts of a session as a notebook shows them."""

    hosts: Mapping[str, range]
    """Ranks by host."""
    activity: Sequence[RankActivity] = ()
    """What they do, if they run."""

    def table(self) -> Table:
        """Return one row for each host."""
        hosts, count = self.hosts, sum(map(len, self.hosts.values()))
        unseen = {rank.host: rank.operation for rank in self.activity if rank.state == "unseen"}
        rows = [
            (host, rank_list(ranks).partition(" ")[2], unseen.get(host, "")) for host, ranks in hosts.items()
        ]
        size = f"{count} rank{'s' * (count != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"
        foot = "-r @name runs a cell on the ranks of one host"
        return Table(size, ("host", "ranks", "problem"), rows, foot).without_empty_columns()
