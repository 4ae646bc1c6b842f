"""The parts of a session on hosts, which stand where one of this machine has its own."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from nbparallel.cluster.host_dispatch import HostDispatcher, HostNames
from nbparallel.cluster.host_place import HostPlace
from nbparallel.cluster.host_pool import NEW_LINE, HostPool
from nbparallel.cluster.joined_views import join_activity, join_names, join_statistics, join_timeline
from nbparallel.errors import NO_RANKS
from nbparallel.session.session import SessionViews

if TYPE_CHECKING:
    from nbparallel.cluster.dask.dask_cluster import DaskCluster
    from nbparallel.session.diagnostics.doctor import Finding
    from nbparallel.session.monitoring.activity import SessionActivity
    from nbparallel.session.monitoring.segments import SessionNames
    from nbparallel.session.monitoring.statistics import SessionStatistics
    from nbparallel.session.monitoring.timeline import Timeline
    from nbparallel.wire.inspection import Completion

MOST_HOSTS = 32
_ADAPTED = ("distributed", "dask")
"""Packages whose clusters `nbparallel.cluster.dask` adapts: a class of one of these, or derived from one."""
VIEW_SECONDS = 3.0
"""Bound for a host's answer to what is only shown; ranks that are asked for their names have a second."""
LOOK_SECONDS = 1.0
"""The same for what ranks do now, which a panel often looks at."""
AGAIN = "the next cell uses a worker of that name, or an unused host: have one of them"


def make_parts(
    cluster: Any,
    world_size: int | None,
    start_method: str,
    ranks_per_host: int | None,
    max_hosts: int | None,
) -> tuple[HostNames, HostDispatcher, HostPool, HostViews]:
    """Return how names, tasks and ranks of a session on a cluster are handled, and what shows them.

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
        pool = HostPool(adapted, place, start_method, names, tasks.output_of)
        return names, tasks, pool, HostViews(pool, names, tasks)
    except BaseException:
        adapted.close()
        raise


def find_adapter(cluster: Any) -> DaskCluster:
    """Return a cluster of Dask's adapted; what has anchors itself, as that of the tests, as it is."""
    if hasattr(cluster, "anchor"):
        return cast("DaskCluster", cluster)
    homes = {base.__module__.partition(".")[0] for base in type(cluster).__mro__}
    if homes.isdisjoint(_ADAPTED) or "distributed" not in sys.modules:
        raise TypeError(
            f"cluster must be a Client of dask.distributed or one of its clusters, not "
            f"{type(cluster).__name__} {cluster!r}"
        )
    from nbparallel.cluster.dask.dask_cluster import DaskCluster

    return DaskCluster(cluster)


def place_ranks(
    hosts: Mapping[str, int], world_size: int | None, ranks_per_host: int | None, max_hosts: int | None
) -> HostPlace:
    """Return which ranks stand on which hosts: host by host, in order of their names.

    Raises
    ------
    TypeError, ValueError
        A number is none, or does not fit the hosts.
    """
    for what, number in (("ranks_per_host", ranks_per_host), ("max_hosts", max_hosts), ("n", world_size)):
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{what} must be an integer, not {type(number).__name__}")
        if number < 1:
            raise ValueError(f"{what} must be at least 1, not {number}")
    if (len(hosts) if max_hosts is None else max_hosts) > MOST_HOSTS:
        asked = f"the cluster has {len(hosts)}" if max_hosts is None else f"max_hosts is {max_hosts}"
        raise ValueError(
            f"a session has at most {MOST_HOSTS} hosts, and {asked}: pass max_hosts={MOST_HOSTS}"
        )
    chosen = {name: ranks_per_host or cpus for name, cpus in list(hosts.items())[:max_hosts]}
    most = sum(chosen.values())
    if world_size is not None and world_size > most:
        listed = ", ".join(f"{size} on {name}" for name, size in chosen.items())
        raise ValueError(f"{world_size} ranks do not fit these hosts, which take {most}: {listed}")
    firsts, names = [0], []
    for name, size in chosen.items():
        if world_size is None or firsts[-1] < world_size:
            names.append(name)
            firsts.append(min(firsts[-1] + size, most if world_size is None else world_size))
    return HostPlace(firsts[-1], tuple(names), tuple(firsts), 0)


class HostViews(SessionViews):
    """Views of a session on hosts: each node is asked what its own session sees."""

    # docstrings inherited

    def __init__(self, pool: HostPool, names: HostNames, tasks: HostDispatcher) -> None:
        nothing: Any = None
        super().__init__(nothing, names, tasks)  # whose methods are all replaced
        self._host_pool = pool
        self._arrays = names.arrays
        self._last: dict[str, tuple[str, SessionActivity]] = {}
        """By host: the time of day of its last answer, and what its ranks did."""

    def _view(
        self, method: str, *arguments: Any, hosts: Sequence[str] | None = None, seconds: float | None = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what the method of that name of each node's session returned, and why others say nothing."""
        lost, seen = self._host_pool.missing, dict[str, Any]()
        there = [host for host in hosts or self._host_pool.running.place.hosts if host not in lost]
        asked = dict.fromkeys(there, pickle.dumps(arguments))
        for host, reply in self._host_pool.cluster.call(method, asked, seconds or VIEW_SECONDS).items():
            if reply.error or reply.silent:
                lost[host] = f"host {host}: {reply.error.partition(NEW_LINE)[0] or 'it does not answer now'}"
            else:
                seen[host] = pickle.loads(reply.data)
        return seen, lost

    def statistics(self, namespace: Mapping[str, Any] | None) -> SessionStatistics:
        seen, missing = self._view("statistics")
        return join_statistics(self._host_pool.place, seen, missing, self._host_pool.start_method)

    def who(self, namespace: Mapping[str, Any] | None, hidden: Mapping[str, Any] | None) -> SessionNames:
        names = self._names.namespace if namespace is None else namespace
        seen, missing = self._view(self.who.__name__)
        return join_names(self._host_pool.place, seen, missing, names or {}, hidden or {})

    def complete(self, text: str, cursor: int, patience: float) -> tuple[Completion, ...]:
        if self._host_pool.pool is None:
            return ()
        seen, _ = self._view("complete", text, cursor, patience, hosts=self._host_pool.place.hosts[:1])
        return next(iter(seen.values()), ())

    def activity(self) -> SessionActivity:
        pool, starting = self._host_pool, self._host_pool.starting
        if pool.pool is None and not starting:
            raise RuntimeError(NO_RANKS)
        seen, missing = ({}, {}) if pool.pool is None else self._view("activity", seconds=LOOK_SECONDS)
        clock, moving, last = self._tasks.clock, self._arrays.moving, self._last
        found = join_activity(pool.place, seen, missing, clock, starting=starting, moving=moving, last=last)
        now = time.strftime("%H:%M:%S")
        self._last = last | {host: (now, activity) for host, activity in seen.items()}
        return found

    def findings(self) -> tuple[Finding, ...]:
        from nbparallel.session.diagnostics.doctor import Finding, Severity

        seen, missing = self._view("findings")
        lost = [Finding("its node", Severity.PROBLEM, why, AGAIN, host) for host, why in missing.items()]
        return (
            *lost,
            *(one for some in seen.values() for one in some),
            _safety(self._host_pool.cluster.address),
        )

    def timeline(self) -> Timeline | None:
        record = self._tasks.record  # without the ranks' notes, which the hosts keep
        if record is None:
            return None
        clock, place = self._tasks.clock, self._host_pool.place
        ranks = clock.ranks if clock.task == record.task else ()
        hosts = sorted(set(map(place.host_of, ranks or place.ranks)))
        return join_timeline(place, record, ranks, *self._view("notes", record.task, hosts=hosts))


def _safety(address: str) -> Finding:
    """Return how safe a session is on a cluster with this address."""
    from nbparallel.session.diagnostics.doctor import Finding, Severity

    seen = f"as safe as the cluster, {address}"
    if address.startswith("tls://"):
        return Finding("security", Severity.OK, f"{seen}: all that travels is encrypted")
    seen = f"{seen}: whatever reaches its scheduler or a worker can run code there"
    advice = "start the cluster with TLS (`security=` of Dask), or where only you can reach it"
    return Finding("security", Severity.WARNING, seen, advice)
