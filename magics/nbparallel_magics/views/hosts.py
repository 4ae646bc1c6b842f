"""``%parallel_cluster``: the hosts of a session on a cluster, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbparallel.errors import rank_list
from nbparallel.errors.text.table import Table, TableView


@dataclass(frozen=True, slots=True, repr=False)
class HostsView(TableView):
    """The hosts of a session as a notebook shows them."""

    hosts: Mapping[str, range]
    """Ranks by host."""

    def table(self) -> Table:
        """Return one row for each host."""
        hosts, count = self.hosts, sum(map(len, self.hosts.values()))
        rows = [(host, rank_list(ranks).partition(" ")[2]) for host, ranks in hosts.items()]
        size = f"{count} rank{'s' * (count != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"
        return Table(size, ("host", "ranks"), rows, "-r @name runs a cell on the ranks of one host")
