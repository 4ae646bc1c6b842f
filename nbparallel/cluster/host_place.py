"""Place of a host: which ranks are on which."""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.errors import HostBoundaryError, rank_list
from nbparallel.wire.identity import WorldPlace

INSIDE_HOSTS = (
    "only messages, barrier, broadcast, reduce, all_reduce, gather, all_gather, scatter, reduce_scatter, "
    "all_to_all and dist's average_gradients, assert_same and batches cross hosts, in a cell on all ranks: "
    "use one of these, or pass group=dist.host_group(), the ranks of this host"
)
LINK = "the link between the hosts is closed"


@dataclass(frozen=True, slots=True)
class HostPlace(WorldPlace):
    """Which ranks stand on which hosts of a session, and which host this is.

    >>> place = HostPlace(5, ("a", "b"), (0, 2, 5), 1)
    >>> place.ranks, place.host_of(1), place.name
    (range(2, 5), 'a', 'b')
    """

    hosts: tuple[str, ...]
    """Names of the hosts."""
    firsts: tuple[int, ...]
    """The first rank of each; behind the last host, the number of all ranks."""
    index: int
    """Which of the hosts this is."""

    @property
    def name(self) -> str:
        """The name of this host."""
        return self.hosts[self.index]

    # docstrings of what is not said here inherited

    @property
    def ranks(self) -> range:
        return self.ranks_of(self.index)

    @property
    def part(self) -> int:
        return self.index

    @property
    def parts(self) -> dict[str, range]:
        return dict(zip(self.hosts, map(range, self.firsts, self.firsts[1:]), strict=True))

    @property
    def no_input(self) -> str:
        return "this rank is on a host of a cluster"

    def index_of(self, rank: int) -> int:
        """Return which of the hosts has a rank."""
        return bisect_right(self.firsts, rank) - 1

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.hosts[self.index_of(rank)]

    def ranks_of(self, host: int) -> range:
        """Return the ranks of a host, given by its index."""
        return range(self.firsts[host], self.firsts[host + 1])

    def around(self, rank: int) -> range:
        return self.ranks_of(self.index_of(rank))

    def label_of(self, rank: int) -> str:
        return f" (host {self.host_of(rank)})"

    def check_reach(self, ranks: Iterable[int], what: str) -> None:
        if others := [rank for rank in ranks if rank not in self.ranks]:
            why = f"{what} on host {self.name} needs {rank_list(others)}, and {INSIDE_HOSTS}"
            raise HostBoundaryError(why)

    def operations(self, context: Any, sender: Any, receiver: Any, fds: Sequence[int]) -> Any:
        """Return `HostOperations` in a cell on all ranks, with which a way to the node has come."""
        if not fds:
            return None
        context.mail.open(fds[0])
        # What fails on another host, or waits there, is recorded in this one's segment, too.
        context.cell.ranks = tuple(range(self.world_size))
        context.cell.peers = tuple(rank for rank in context.cell.ranks if rank != context.rank)
        operations = importlib.import_module("nbparallel.cluster.host_operations")  # which stands on this one
        return operations.HostOperations(context, self, sender, receiver)

    def mail(self, context: Any) -> Any:
        return importlib.import_module("nbparallel.cluster.rank_mail").RankMail(context)
