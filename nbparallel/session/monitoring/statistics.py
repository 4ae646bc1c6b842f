"""Session statistics: a frozen picture of ranks, segments and limits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbparallel import sharing
from nbparallel.session.monitoring.segments import SharedSegment, gather, names_by_segment, released_since
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.sharing.memory.memory_limits import limits


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """One rank at one moment."""

    rank: int
    """Its number."""
    pid: int
    """Its process."""
    state: str
    """``idle``, ``computing``, ``waiting``, ``dead`` …"""
    rss_nbytes: int
    """Resident memory, shared pages included."""
    private_nbytes: int
    """Of it, memory that no other process maps."""
    threads: int
    """Threads of the process."""
    operation: str
    """The operation that it waits in, or an empty string."""
    line: int
    """The line of the cell of that operation; 0 unknown."""
    task: int
    """Number of the task that it runs or ran last."""


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """A session at one moment."""

    session: str
    """Its id."""
    start_method: str
    """``forkserver`` or ``spawn``."""
    world_size: int
    """Number of ranks."""
    epoch: int
    """Counts communicators: a failure starts a new one."""
    strategy: str
    """Sharing strategy for new arrays."""
    supervisor_pid: int
    """Process that starts and watches the ranks."""
    template_pid: int
    """Process that ranks are forked from; 0 without one."""
    ranks: tuple[RankStatistics, ...]
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
    """Bytes that the machine, or the container, still allows; None if unknown."""
    ledger_answered: bool
    """Whether the supervisor reported its ledger; False: `SharedSegment.ranks` is not complete."""
    descriptors: int
    """Open files of this process."""
    descriptor_limit: int
    """Their limit (``ulimit -n``)."""


def take_statistics(
    start_method: str, pool: RankPool, namespace: Mapping[str, Any] | None
) -> SessionStatistics:
    """Return a picture of the session; waits for no rank, and at most a second for the supervisor."""
    import resource

    store = sharing.current_store()
    ledger = pool.supervisor.ledger.ask()
    here = store.segments(pool.supervisor.broker)
    made = [segment.nbytes for segment in here if segment.own and segment.phase != "pooled"]
    pooled = sum(segment.nbytes for segment in here if segment.phase == "pooled")
    of_ranks = [handle.memory for handle in pool.handles if handle.alive]
    gone = [] if ledger is None else released_since(ledger, pool.handles)
    names = {} if namespace is None else names_by_segment(namespace, store)
    return SessionStatistics(
        session=pool.session,
        start_method=start_method,
        world_size=len(pool.handles),
        epoch=pool.epoch,
        strategy=sharing.get_sharing_strategy(),
        supervisor_pid=pool.supervisor.pid,
        template_pid=pool.supervisor.template_pid,
        ranks=tuple(_rank(handle, pool) for handle in pool.handles),
        segments=gather(here, ledger or (), pool.handles, names),
        shared_segments=len(made) + sum(memory.count for memory in of_ranks) - len(gone),
        shared_nbytes=sum(made) + sum(memory.nbytes for memory in of_ranks) - sum(n.nbytes for n in gone),
        pooled_nbytes=pooled + sum(memory.pooled_nbytes for memory in of_ranks),
        free_nbytes=min((limit.free for limit in limits()), default=None),
        ledger_answered=ledger is not None,
        descriptors=len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        descriptor_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _rank(handle: RankHandle, pool: RankPool) -> RankStatistics:
    import psutil

    state, operation, line = ("idle" if not handle.busy else "computing"), "", 0
    if handle.busy and pool.control is not None and handle.rank < pool.control.world_size:
        slot = pool.control.read_slot(handle.rank)
        if slot.readable and slot.state.name == "WAITING":
            state, operation, line = "waiting", slot.operation.name.lower(), slot.line
    rss = private = threads = 0
    if handle.death is not None:
        state = "dead"
    else:
        try:
            process = psutil.Process(handle.pid)
            # uss: pages that the fork still shares with the template do not count
            memory = process.memory_full_info()
            rss, private, threads = memory.rss, memory.uss, process.num_threads()
            if process.status() == psutil.STATUS_STOPPED:
                state = "stopped"
        except psutil.Error:
            state = "dead"
    return RankStatistics(handle.rank, handle.pid, state, rss, private, threads, operation, line, handle.task)
