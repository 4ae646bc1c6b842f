"""Session statistics: a frozen picture of ranks, segments and limits."""

from __future__ import annotations

import resource
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from nbparallel import sharing
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.session.monitoring.segments import (
    SharedSegment,
    gather,
    memory_extent,
    names_by_segment,
    released_since,
    sum_up,
)
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.wire.system import open_descriptors, process_limit


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """A session at one moment; of one on several hosts, sums over those that answered."""

    session: str
    """Its id; empty on hosts, as each has its own, like the two processes below."""
    start_method: str
    """``forkserver`` or ``spawn``."""
    world_size: int
    """Number of ranks."""
    epoch: int
    """Counts communicators: a failure starts a new one."""
    strategy: str
    """Sharing strategy for new arrays."""
    supervisor_pid: int
    """Process that starts and watches the ranks; 0: one on each host."""
    template_pid: int
    """Process that ranks are forked from; 0 without one."""
    ranks: tuple[RankActivity, ...]
    """All ranks, in order."""
    segments: tuple[SharedSegment, ...]
    """Segments in use, the largest first; a rank that made many reports its largest only."""
    shared_segments: int
    """Segments in use that this process and the ranks made; a rank's as of the end of its last task."""
    shared_nbytes: int
    """Their bytes."""
    pooled_nbytes: int
    """Memory that this process and the ranks keep for the next arrays, in bytes."""
    free_nbytes: int | None
    """Bytes that the machine, or the container, still allows, on hosts the fullest one; None if unknown."""
    ledger_answered: bool
    """Whether the supervisor reported its ledger; False: `SharedSegment.ranks` is not complete."""
    descriptors: int
    """Open files of this process."""
    descriptor_limit: int
    """Their limit (``ulimit -n``)."""
    frames_nbytes: int = 0
    """What frames of failures keep alive on ranks, for ``%debug``: each rank's until its next cell."""


def take_statistics(
    start_method: str,
    pool: RankPool,
    namespace: Mapping[str, Any] | None,
    activity: SessionActivity,
    copies: MutableMapping[int, tuple[str, weakref.ref[Any]]],
) -> SessionStatistics:
    """Return a picture of the session; waits for no rank, and at most a second for the supervisor.

    `copies` are segments with copies of the notebook's objects for ranks; those that hold none now go.
    """
    store = sharing.current_store()
    ledger = pool.supervisor.ledger()
    here, handles = store.segments(pool.supervisor.broker), list(pool.handles)
    totals = sum_up(here, handles, () if ledger is None else released_since(ledger, handles))
    names: dict[int, tuple[str, ...]] = {}
    for record in here:
        name, memory = copies.get(record.segment, ("", lambda: None))
        if name and (record.phase == "released" or memory() is not None):
            names[record.segment] = (name,)
    for segment in copies.keys() - names.keys():
        copies.pop(segment, None)
    names |= {} if namespace is None else names_by_segment(namespace, store)
    return SessionStatistics(
        session=pool.session,
        start_method=start_method,
        world_size=len(handles),
        epoch=pool.epoch,
        strategy=activity.strategy,
        supervisor_pid=pool.supervisor.pid,
        template_pid=pool.supervisor.template_pid,
        ranks=tuple(map(_rank, activity.ranks)),
        segments=gather(here, ledger or (), handles, names),
        shared_segments=totals.segments,
        shared_nbytes=totals.nbytes,
        pooled_nbytes=totals.pooled_nbytes,
        free_nbytes=memory_extent()[0],
        ledger_answered=ledger is not None,
        descriptors=open_descriptors() or 0,
        descriptor_limit=process_limit(resource.RLIMIT_NOFILE)[0] or 0,
        frames_nbytes=sum(handle.memory.frames_nbytes for handle in handles if handle.alive),
    )


def _rank(seen: RankActivity) -> RankActivity:
    """Return a rank with ``stopped`` for its state where that is so, and without how it died."""
    if seen.state == "dead":
        return replace(seen, operation="")
    return replace(seen, state="stopped") if seen.stopped and seen.state != "starting" else seen
