"""The parts of a session on hosts, which stand where one of this machine has its own."""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast

from nbparallel.cluster.contract import Cluster, Host
from nbparallel.cluster.host_dispatch import HostDispatcher, HostNames
from nbparallel.cluster.host_pool import HostPool
from nbparallel.wire.identity import WorldPlace

MOST_HOSTS = 32
_ADAPTED = ("distributed", "dask")
"""Packages whose clusters `nbparallel.cluster.dask` adapts: a class of one of these, or derived from one."""


def make_parts(
    cluster: Any,
    world_size: int | None,
    start_method: str,
    ranks_per_host: int | None,
    max_hosts: int | None,
) -> tuple[HostNames, HostDispatcher, HostPool]:
    """Return how names, tasks and ranks of a session on a cluster are handled.

    Raises
    ------
    TypeError
        `cluster` is none.
    StartError, ValueError
        It has no hosts, or they cannot hold so many ranks.
    """
    adapted = find_adapter(cluster)
    try:
        place = place_ranks(adapted.hosts(), world_size, ranks_per_host, max_hosts)
        names = HostNames()
        tasks = HostDispatcher(names)
        return names, tasks, HostPool(adapted, place, start_method, names, tasks.output_of)
    except BaseException:
        adapted.close()
        raise


def find_adapter(cluster: Any) -> Cluster:
    """Return a cluster of ours as it is, one of Dask's adapted."""
    if isinstance(cluster, Cluster):
        return cluster
    homes = {base.__module__.partition(".")[0] for base in type(cluster).__mro__}
    if homes.isdisjoint(_ADAPTED) or "distributed" not in sys.modules:
        raise TypeError(
            f"cluster must be a Client of dask.distributed or one of its clusters, not "
            f"{type(cluster).__name__} {cluster!r}"
        )
    adapter: Any = importlib.import_module("nbparallel.cluster.dask.dask_cluster")
    return cast(Cluster, adapter.DaskCluster(cluster))


def place_ranks(
    hosts: tuple[Host, ...], world_size: int | None, ranks_per_host: int | None, max_hosts: int | None
) -> WorldPlace:
    """Return which ranks stand on which hosts: host by host, in order of their names.

    Raises
    ------
    TypeError, ValueError
        A number is none, or does not fit the hosts.
    """
    for name, number in (("ranks_per_host", ranks_per_host), ("max_hosts", max_hosts), ("n", world_size)):
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an integer, not {type(number).__name__}")
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if (len(hosts) if max_hosts is None else max_hosts) > MOST_HOSTS:
        asked = f"the cluster has {len(hosts)}" if max_hosts is None else f"max_hosts is {max_hosts}"
        raise ValueError(
            f"a session has at most {MOST_HOSTS} hosts, and {asked}: pass max_hosts={MOST_HOSTS}"
        )
    chosen = hosts[:max_hosts]
    sizes = [ranks_per_host or host.cpus for host in chosen]
    most = sum(sizes)
    if world_size is not None and world_size > most:
        listed = ", ".join(f"{size} on {host.name}" for host, size in zip(chosen, sizes, strict=True))
        raise ValueError(f"{world_size} ranks do not fit these hosts, which take {most}: {listed}")
    firsts, names = [0], []
    for host, size in zip(chosen, sizes, strict=True):
        if world_size is None or firsts[-1] < world_size:
            names.append(host.name)
            firsts.append(min(firsts[-1] + size, most if world_size is None else world_size))
    return WorldPlace(tuple(names), tuple(firsts), 0)
