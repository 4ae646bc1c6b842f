"""The parts of a session on hosts, which stand where one of this machine has its own."""

from __future__ import annotations

import pickle
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from nbparallel import sharing
from nbparallel.cluster.host_dispatch import HostDispatcher, HostNames
from nbparallel.cluster.host_messages import HostClock, on_other_clock
from nbparallel.cluster.host_place import HostPlace
from nbparallel.cluster.host_pool import NEW_LINE, HostPool
from nbparallel.errors import NO_RANKS
from nbparallel.session.monitoring.activity import (
    RankActivity,
    SessionActivity,
    SessionStatistics,
    culprits_of,
    phase_fields,
)
from nbparallel.session.monitoring.segments import NOTEBOOK, SessionNames, compare_names
from nbparallel.session.monitoring.timeline import Timeline, build_timeline
from nbparallel.session.results import CellRecord
from nbparallel.session.session import SessionViews
from nbparallel.wire.inspection import Origin, VariableInfo
from nbparallel.wire.system import open_descriptors, process_limit

if TYPE_CHECKING:
    from nbparallel.cluster.dask.dask_cluster import DaskCluster
    from nbparallel.session.diagnostics.doctor import Finding
    from nbparallel.wire.inspection import Completion

MOST_HOSTS = 32
VIEW_SECONDS = 3.0
"""Bound for a host's answer to what is only shown; ranks that are asked for their names have a second."""
LOOK_SECONDS = 1.0
"""The same for what ranks do now, which a panel often looks at."""
AGAIN = "the next cell uses a worker of that name, or an unused host: have one of them"


def make_parts(
    cluster: Any, world_size: int | None, start_method: str, ranks_per_host: int | None, max_hosts: int | None
) -> tuple[HostNames, HostDispatcher, HostPool, HostViews]:
    """Return how names, tasks and ranks of a session on a cluster are handled, and what shows them."""
    adapted = find_adapter(cluster)
    try:
        place = place_ranks(adapted.hosts(), world_size, ranks_per_host, max_hosts)
        names = HostNames()
        tasks = HostDispatcher(names)
        pool: Any = HostPool(adapted, place, start_method, names, tasks.output_of)
        return names, tasks, pool, HostViews(pool, names, tasks)
    except BaseException:
        adapted.close()
        raise


def find_adapter(cluster: Any) -> DaskCluster:
    """Return a cluster of Dask's adapted; what has anchors itself, as that of the tests, as it is."""
    if hasattr(cluster, "anchor"):
        return cast("DaskCluster", cluster)
    # one of a class of Dask's packages, or derived from one
    homes = {base.__module__.partition(".")[0] for base in type(cluster).__mro__}
    if homes.isdisjoint({"distributed", "dask"}) or "distributed" not in sys.modules:
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

    It raises if a number is none, or does not fit the hosts.
    """
    for what, number in (("ranks_per_host", ranks_per_host), ("max_hosts", max_hosts), ("n", world_size)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"{what} must be an integer, not {type(number).__name__}")
        if number is not None and number < 1:
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
    firsts, names, total = [0], [], most if world_size is None else world_size
    for name, size in chosen.items():
        if firsts[-1] < total:
            names.append(name)
            firsts.append(min(firsts[-1] + size, total))
    return HostPlace(firsts[-1], tuple(names), tuple(firsts), 0)


UNSEEN = "unseen"
"""State of a rank whose host does not answer, or is lost."""
_HOST_BITS = 64
"""Of a segment's number, below the host's."""


class HostViews(SessionViews):
    """Views of a session on hosts: each node is asked what its own session sees of its own ranks.

    Ranks have the numbers of the whole session there.  Numbers of segments are each host's: here they get the
    host's number above theirs.
    """

    # docstrings inherited

    _ranks: Any  # a `HostPool`
    _names: HostNames
    _last: Mapping[int, tuple[str, RankActivity]] = MappingProxyType({})
    """By rank: the time of day of its host's last answer, and what it did."""

    def _view(
        self, method: str, *arguments: Any, hosts: Sequence[str] | None = None, seconds: float | None = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what the method of that name of each node's session returned, and why others say nothing."""
        pool, seen = self._ranks, dict[str, Any]()
        lost = {h: f"host {h} is lost: {why.partition(NEW_LINE)[0]}" for h, why in pool.losses.items()}
        there = [host for host in hosts or pool.running.place.hosts if host not in lost]
        asked = dict.fromkeys(there, pickle.dumps(arguments))
        for host, reply in pool.cluster.call(method, asked, seconds or VIEW_SECONDS).items():
            if reply.error or reply.silent:
                lost[host] = f"host {host}: {reply.error.partition(NEW_LINE)[0] or 'it does not answer now'}"
            else:
                seen[host] = pickle.loads(reply.data)
        return seen, lost

    def _unseen(self, rank: int, missing: Mapping[str, str]) -> RankActivity:
        host = self._ranks.place.host_of(rank)
        return RankActivity(rank, 0, UNSEEN, missing.get(host, ""), 0, (), 0, 0, 0, None, host=host)

    def _number(self, segment: int, host: str) -> int:
        return segment and segment + (self._ranks.place.hosts.index(host) + 1 << _HOST_BITS)

    def statistics(self, namespace: Mapping[str, Any] | None) -> SessionStatistics:
        seen, missing = self._view("statistics")
        pool, parts = self._ranks, list[SessionStatistics](seen.values())
        known = {rank.rank: replace(rank, host=host) for host, part in seen.items() for rank in part.ranks}
        free = [part.free_nbytes for part in parts if part.free_nbytes is not None]
        segments = [
            replace(
                record,
                segment=self._number(record.segment, host),
                maker=f"host {host}" if record.maker == NOTEBOOK else record.maker,
                notebook=False,
                host=host,
            )
            for host, part in seen.items()
            for record in part.segments
        ]
        return SessionStatistics(
            session="",
            start_method=pool.start_method,
            world_size=pool.place.world_size,
            epoch=max((part.epoch for part in parts), default=0),
            strategy=", ".join(sorted({part.strategy for part in parts})),
            supervisor_pid=0,
            template_pid=0,
            ranks=tuple(known.get(rank) or self._unseen(rank, missing) for rank in pool.ranks),
            segments=tuple(sorted(segments, key=lambda record: (-record.nbytes, record.segment))),
            shared_segments=sum(part.shared_segments for part in parts),
            shared_nbytes=sum(part.shared_nbytes for part in parts),
            pooled_nbytes=sum(part.pooled_nbytes for part in parts),
            free_nbytes=min(free, default=None),
            ledger_answered=all(part.ledger_answered for part in parts),
            descriptors=open_descriptors() or 0,
            descriptor_limit=process_limit(resource.RLIMIT_NOFILE)[0] or 0,
        )

    def who(self, namespace: Mapping[str, Any] | None, hidden: Mapping[str, Any] | None) -> SessionNames:
        names = self._names.namespace if namespace is None else namespace
        seen, missing = self._view(self.who.__name__)
        known: dict[int, dict[str, VariableInfo]] = {}
        for host, part in seen.items():
            for record in part.names:
                for rank, info in record.ranks.items():
                    sent = replace(info, segment=self._number(info.segment, host))
                    if info.origin is Origin.SHARED:  # what the notebook's arrays are there are copies
                        sent = replace(sent, origin=Origin.COPIED, as_delivered=True)
                    known.setdefault(rank, {})[record.name] = sent
        parts, places = list[SessionNames](seen.values()), self._ranks.place.parts
        silent = {rank: why for part in parts for rank, why in part.silent.items()}
        return SessionNames(
            names=compare_names(names or {}, hidden or {}, sharing.current_store(), known),
            answered=tuple(rank for part in parts for rank in part.answered),
            busy=tuple(rank for part in parts for rank in part.busy),
            dead=tuple(rank for part in parts for rank in part.dead),
            silent=silent | {rank: why for host, why in missing.items() for rank in places.get(host, ())},
            left_out=sum(part.left_out for part in parts),
        )

    def complete(self, text: str, cursor: int, patience: float) -> tuple[Completion, ...]:
        if self._ranks.pool is None:
            return ()
        seen, _ = self._view("complete", text, cursor, patience, hosts=self._ranks.place.hosts[:1])
        return next(iter(seen.values()), ())

    def activity(self) -> SessionActivity:
        pool, clock, starting = self._ranks, self._tasks.clock, self._ranks.starting
        if pool.pool is None and not starting:
            raise RuntimeError(NO_RANKS)
        seen, missing = ({}, {}) if pool.pool is None else self._view("activity", seconds=LOOK_SECONDS)
        parts = list[SessionActivity](seen.values())
        known: dict[int, RankActivity] = {
            rank.rank: replace(rank, host=host) for host, part in seen.items() for rank in part.ranks
        }
        last, now = self._last, time.strftime("%H:%M:%S")
        self._last = {**last, **{rank: (now, activity) for rank, activity in known.items()}}

        def of_rank(rank: int) -> RankActivity:
            host = pool.place.host_of(rank)
            if rank in known:
                return known[rank]
            if rank in starting:
                return RankActivity(rank, 0, "starting", "", 0, (), 0.0, 0.0, 0.0, 0, host=host)
            as_of, before = last.get(rank, ("", None))
            if before is None or before.task != clock.task:
                return self._unseen(rank, missing)
            why = f"{missing.get(host, '')}; as of {as_of}"
            return replace(before, state=UNSEEN, operation=why, waits_for=(), seconds=0.0)

        ranks = _awaited_anywhere(tuple(map(of_rank, pool.ranks)))
        ended = max((rank.finished for rank in ranks), default=0.0)
        running = [part.seconds for part in parts if part.running]
        limits = [part.limit_nbytes for part in parts]
        return SessionActivity(
            running=clock.running,
            number=clock.number,
            seconds=max(running, default=0.0) if clock.running else ended,
            ranks=ranks,
            strategy=", ".join(sorted({part.strategy for part in parts})),
            segments=sum(part.segments for part in parts),
            nbytes=sum(part.nbytes for part in parts),
            pooled_nbytes=sum(part.pooled_nbytes for part in parts),
            **phase_fields(clock, starting, self._names.arrays.moving),
            limit_nbytes=None if None in limits or not limits else sum(limit or 0 for limit in limits),
            culprits=culprits_of(ranks),
        )

    def findings(self) -> tuple[Finding, ...]:
        from nbparallel.session.diagnostics.doctor import Finding, Severity

        seen, missing = self._view("findings")
        lost = [Finding("its node", Severity.PROBLEM, why, AGAIN, host) for host, why in missing.items()]
        address = self._ranks.cluster.address
        safe = f"as safe as the cluster, {address}"
        if address.startswith("tls://"):
            safety = Finding("security", Severity.OK, f"{safe}: all that travels is encrypted")
        else:
            reach = f"{safe}: whatever reaches its scheduler or a worker can run code there"
            advice = "start the cluster with TLS (`security=` of Dask), or where only you can reach it"
            safety = Finding("security", Severity.WARNING, reach, advice)
        return (*lost, *(one for some in seen.values() for one in some), safety)

    def timeline(self) -> Timeline | None:
        """Return the timeline of a cell on all hosts.

        Times are the first host's.  Where clocks were not compared, each host's count from its own beginning.
        """
        record = self._tasks.record  # without the ranks' notes, which the hosts keep
        if record is None:
            return None
        cell, place = self._tasks.clock, self._ranks.place
        ranks = cell.ranks if cell.task == record.task else ()
        hosts = sorted(set(map(place.host_of, ranks or place.ranks)))
        seen, missing = self._view("notes", record.task, hosts=hosts)
        parts: list[tuple[CellRecord, HostClock | None]] = [
            each for each in seen.values() if each is not None
        ]
        compared = all(clock is not None and clock.known for _, clock in parts)
        moved = [
            on_other_clock(part, clock.on_first if compared and clock else partial(add, 1 - part.began_ns))
            for part, clock in parts
        ]
        known = {rank: notes for part in moved for rank, notes in part.ranks.items()}
        died = {rank: how for part in moved for rank, how in part.died.items()}
        for rank in sorted(set(ranks) - known.keys() - died.keys()):
            host = place.host_of(rank)
            why = missing.get(host, f"host {host} knows nothing of the cell any more")
            died[rank] = f"is not seen: {why}"
        times = {rank: of_rank for part in moved for rank, of_rank in part.times.items()}
        began = min((part.began_ns for part in moved), default=0)
        timeline = build_timeline(replace(record, ranks=known, died=died, times=times, began_ns=began))
        rows = tuple(replace(row, host=place.host_of(row.rank)) for row in timeline.rows)
        errors = [clock.error_ns / 1e9 for _, clock in parts if clock and compared]
        error = max(errors, default=0.0) if compared or len(parts) < 2 else None
        return replace(timeline, rows=rows, cpus=0, clock_error=error)


def _awaited_anywhere(ranks: tuple[RankActivity, ...]) -> tuple[RankActivity, ...]:
    """Return the ranks, of which none waits for one that waits too: a host does not see those of others."""
    waiting = {rank.rank for rank in ranks if rank.state == "waiting"}
    return tuple(
        replace(rank, waits_for=tuple(other for other in rank.waits_for if other not in waiting))
        if {ranks[other].host for other in rank.waits_for} - {rank.host}
        else rank
        for rank in ranks
    )
