"""One view of a session on several hosts, made of what each host's session sees of its own ranks.

Ranks have the numbers of the whole session there.  Numbers of segments are each host's: here they get the
host's number above theirs.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from typing import Any

from nbparallel import sharing
from nbparallel.cluster.host_messages import HostNotes, on_other_clock
from nbparallel.cluster.host_place import HostPlace
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity, culprits_of, phase_fields
from nbparallel.session.monitoring.segments import NOTEBOOK, SessionNames, SharedSegment, compare_names
from nbparallel.session.monitoring.statistics import SessionStatistics
from nbparallel.session.monitoring.timeline import Timeline, build_timeline
from nbparallel.session.results import CellClock, CellRecord
from nbparallel.wire.inspection import Origin, VariableInfo
from nbparallel.wire.system import open_descriptors, process_limit

UNSEEN = "unseen"
"""State of a rank whose host does not answer, or is lost."""
_HOST_BITS = 64
"""Of a segment's number, below the host's."""


def join_activity(
    place: HostPlace,
    seen: Mapping[str, SessionActivity],
    missing: Mapping[str, str],
    clock: CellClock,
    *,
    starting: tuple[int, ...] = (),
    moving: tuple[str, int] | None = None,
    last: Mapping[str, tuple[str, SessionActivity]] | None = None,
) -> SessionActivity:
    """Return what happens on all hosts; `missing`: why some say nothing, `clock`: the whole cell's.

    A host that says nothing has done what it said `last` in this cell, at that time of day.
    """
    known = {rank.rank: rank for activity in seen.values() for rank in activity.ranks}

    def of_rank(rank: int, host: str) -> RankActivity:
        if rank in starting or rank in known:
            found = known.get(rank) or RankActivity(rank, 0, "starting", "", 0, (), 0.0, 0.0, 0.0, 0)
            return replace(found, host=host)
        as_of, before = (last or {}).get(host, ("", None))
        for found in before.ranks if before is not None else ():
            if found.rank == rank and found.task == clock.task:
                why = f"{missing.get(host, '')}; as of {as_of}"
                return replace(found, host=host, state=UNSEEN, operation=why, waits_for=(), seconds=0.0)
        return _unseen(rank, host, missing)

    ranks = _awaited_anywhere(tuple(of_rank(rank, host) for rank, host in _places(place)))
    ended = max((rank.finished for rank in ranks), default=0.0)
    running = [activity.seconds for activity in seen.values() if activity.running]
    limits = [activity.limit_nbytes for activity in seen.values()]
    return SessionActivity(
        running=clock.running,
        number=clock.number,
        seconds=max(running, default=0.0) if clock.running else ended,
        ranks=ranks,
        strategy=", ".join(sorted({activity.strategy for activity in seen.values()})),
        segments=sum(activity.segments for activity in seen.values()),
        nbytes=sum(activity.nbytes for activity in seen.values()),
        pooled_nbytes=sum(activity.pooled_nbytes for activity in seen.values()),
        **phase_fields(clock, starting, moving),
        limit_nbytes=None if None in limits or not limits else sum(limit or 0 for limit in limits),
        culprits=culprits_of(ranks),
    )


def _unseen(rank: int, host: str, missing: Mapping[str, str]) -> RankActivity:
    return RankActivity(rank, 0, UNSEEN, missing.get(host, ""), 0, (), 0, 0, 0, None, host=host)


def _awaited_anywhere(ranks: tuple[RankActivity, ...]) -> tuple[RankActivity, ...]:
    """Return the ranks, of which none waits for one that waits too: a host does not see those of others."""
    waiting = {rank.rank for rank in ranks if rank.state == "waiting"}
    return tuple(
        replace(rank, waits_for=tuple(other for other in rank.waits_for if other not in waiting))
        if {ranks[other].host for other in rank.waits_for} - {rank.host}
        else rank
        for rank in ranks
    )


def join_statistics(
    place: HostPlace, seen: Mapping[str, SessionStatistics], missing: Mapping[str, str], start_method: str
) -> SessionStatistics:
    """Return a picture of all hosts; `missing`: why some say nothing."""
    parts = list(seen.values())
    known = {rank.rank: rank for part in parts for rank in part.ranks}
    free = [part.free_nbytes for part in parts if part.free_nbytes is not None]

    ranks = [
        replace(known[rank], host=host) if rank in known else _unseen(rank, host, missing)
        for rank, host in _places(place)
    ]
    segments = [_of_host(segment, host, place) for host, part in seen.items() for segment in part.segments]
    return SessionStatistics(
        session="",
        start_method=start_method,
        world_size=place.world_size,
        epoch=max((part.epoch for part in parts), default=0),
        strategy=", ".join(sorted({part.strategy for part in parts})),
        supervisor_pid=0,
        template_pid=0,
        ranks=tuple(ranks),
        segments=tuple(sorted(segments, key=lambda record: (-record.nbytes, record.segment))),
        shared_segments=sum(part.shared_segments for part in parts),
        shared_nbytes=sum(part.shared_nbytes for part in parts),
        pooled_nbytes=sum(part.pooled_nbytes for part in parts),
        free_nbytes=min(free, default=None),
        ledger_answered=all(part.ledger_answered for part in parts),
        descriptors=open_descriptors() or 0,
        descriptor_limit=process_limit(resource.RLIMIT_NOFILE)[0] or 0,
    )


def join_names(
    place: HostPlace,
    seen: Mapping[str, SessionNames],
    missing: Mapping[str, str],
    namespace: Mapping[str, Any],
    hidden: Mapping[str, Any],
) -> SessionNames:
    """Return the names of the notebook and of all ranks; what the notebook's arrays are there are copies."""
    known: dict[int, dict[str, VariableInfo]] = {}
    for host, part in seen.items():
        for record in part.names:
            for rank, info in record.ranks.items():
                known.setdefault(rank, {})[record.name] = _sent(info, host, place)
    parts = list(seen.values())
    silent = {rank: why for part in parts for rank, why in part.silent.items()}
    return SessionNames(
        names=compare_names(namespace, hidden, sharing.current_store(), known),
        answered=tuple(rank for part in parts for rank in part.answered),
        busy=tuple(rank for part in parts for rank in part.busy),
        dead=tuple(rank for part in parts for rank in part.dead),
        silent=silent | {rank: missing[host] for rank, host in _places(place) if host in missing},
        left_out=sum(part.left_out for part in parts),
    )


def join_timeline(
    place: HostPlace,
    record: CellRecord,
    ranks: Sequence[int],
    seen: Mapping[str, HostNotes | None],
    missing: Mapping[str, str],
) -> Timeline:
    """Return the timeline of a cell on all hosts; `record`: what the notebook knows of it, on these `ranks`.

    Times are the first host's.  Where clocks were not compared, each host's count from its own beginning.
    """
    parts = [notes for notes in seen.values() if notes is not None]
    compared = all(clock is not None and clock.known for _, clock in parts)
    moved = [
        on_other_clock(part, clock.on_first if compared and clock else partial(add, 1 - part.began_ns))
        for part, clock in parts
    ]
    known = {rank: notes for part in moved for rank, notes in part.ranks.items()}
    died = {rank: how for part in moved for rank, how in part.died.items()}
    for rank in ranks:
        if rank not in known and rank not in died:
            host = place.host_of(rank)
            died[rank] = (
                f"is not seen: {missing.get(host, f'host {host} knows nothing of the cell any more')}"
            )
    times = {rank: of_rank for part in moved for rank, of_rank in part.times.items()}
    began = min((part.began_ns for part in moved), default=0)
    timeline = build_timeline(replace(record, ranks=known, died=died, times=times, began_ns=began))
    rows = tuple(replace(row, host=place.host_of(row.rank)) for row in timeline.rows)
    errors = [clock.error_ns / 1e9 for _, clock in parts if clock and compared]
    error = max(errors, default=0.0) if compared or len(parts) < 2 else None
    return replace(timeline, rows=rows, cpus=0, clock_error=error)


def _places(place: HostPlace) -> Iterator[tuple[int, str]]:
    return ((rank, host) for host, ranks in place.parts.items() for rank in ranks)


def _number(segment: int, host: str, place: HostPlace) -> int:
    return segment and segment + (place.hosts.index(host) + 1 << _HOST_BITS)


def _of_host(record: SharedSegment, host: str, place: HostPlace) -> SharedSegment:
    maker = f"host {host}" if record.maker == NOTEBOOK else record.maker
    number = _number(record.segment, host, place)
    return replace(record, segment=number, maker=maker, notebook=False, host=host)


def _sent(info: VariableInfo, host: str, place: HostPlace) -> VariableInfo:
    info = replace(info, segment=_number(info.segment, host, place))
    return replace(info, origin=Origin.COPIED, as_delivered=True) if info.origin is Origin.SHARED else info
