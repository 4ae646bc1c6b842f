"""Boundary between hosts: what ranks cannot do across it, in words."""

from __future__ import annotations

from collections.abc import Iterable

from nbparallel.errors import HostBoundaryError, rank_list
from nbparallel.wire.identity import WorldPlace

INSTEAD = (
    "only barrier, broadcast, reduce, all_reduce, gather, all_gather, scatter, reduce_scatter, all_to_all "
    "and dist's average_gradients, assert_same and batches cross hosts, in a cell on all ranks: use one of "
    "these, or pass group=dist.host_group(), the ranks of this host"
)


def check_reach(hosts: WorldPlace | None, ranks: Iterable[int], what: str) -> None:
    """Raise if one of `ranks`, which `what` needs, is on another host."""
    if hosts is not None and (others := [rank for rank in ranks if rank not in hosts.ranks]):
        raise HostBoundaryError(f"{what} on host {hosts.name} needs {rank_list(others)}, and {INSTEAD}")


def inside_only(hosts: WorldPlace, what: str, instead: str) -> HostBoundaryError:
    """Return the error about a form of an operation that is not built over hosts, and what to do instead."""
    return HostBoundaryError(
        f"{what} on host {hosts.name} needs a group of this host's ranks: {instead}, or pass "
        "group=dist.host_group()"
    )
