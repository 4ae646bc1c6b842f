"""SessionActivity: what ranks do at this moment, cheap enough to be asked several times a second.

Read from the control segment and from what this process knows; no rank and no other process is asked, and
none notices.  `statistics` tells more, and takes longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from nbparallel import sharing
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.tasks.dispatch import TaskDispatcher
from nbparallel.session.tasks.outcomes import describe_death
from nbparallel.wire.control import ControlView, SlotRecord, State


@dataclass(frozen=True, slots=True)
class RankActivity:
    """One rank at one moment."""

    rank: int
    """Its number."""
    pid: int
    """Its process."""
    state: str
    """``idle``, ``computing``, ``waiting`` or ``dead``."""
    operation: str
    """The operation that it waits in; of a dead one how it ended."""
    line: int
    """The line of the cell that it is on; 0 unknown."""
    waits_for: tuple[int, ...]
    """The ranks that have to come for the wait to end; empty: not known, or any."""
    seconds: float
    """How long it has been waiting; 0 if it is not."""
    computing: float
    """Seconds of the cell that runs, or ran last, in which it did not wait."""
    waiting: float
    """Seconds in which it did."""
    operations: int
    """Operations of that cell; while it runs as of the last wait."""


@dataclass(frozen=True, slots=True)
class SessionActivity:
    """A session at one moment."""

    running: bool
    """Whether a cell is on the ranks."""
    number: int
    """The ``In[n]`` of the cell that runs, or ran last; 0: none yet, or a call."""
    seconds: float
    """How long it has been running, or took."""
    ranks: tuple[RankActivity, ...]
    """In order."""
    strategy: str
    """Sharing strategy for new arrays."""
    segments: int
    """Segments in use that notebook and ranks made; a rank's as of the end of its last cell."""
    nbytes: int
    """Their bytes."""
    pooled_nbytes: int
    """Memory that is kept for the next arrays, in bytes."""


def take(pool: RankPool, tasks: TaskDispatcher) -> SessionActivity:
    """Return what happens now; waits for nobody, from any thread."""
    here = sharing.current_store().segments(pool.supervisor.broker)
    made = [segment.nbytes for segment in here if segment.own and segment.phase != "pooled"]
    pooled = sum(segment.nbytes for segment in here if segment.phase == "pooled")
    handles = list(pool.handles)
    memories = [handle.memory for handle in handles if handle.alive]
    clock = tasks.clock
    now = time.monotonic_ns()
    return SessionActivity(
        running=clock.running,
        number=clock.number,
        seconds=((now if clock.running else clock.ended_ns) - clock.began_ns) / 1e9,
        ranks=tuple(_rank(handle, pool.control, tasks, now) for handle in handles),
        strategy=sharing.get_sharing_strategy(),
        segments=len(made) + sum(memory.count for memory in memories),
        nbytes=sum(made) + sum(memory.nbytes for memory in memories),
        pooled_nbytes=pooled + sum(memory.pooled_nbytes for memory in memories),
    )


def _rank(handle: RankHandle, control: ControlView | None, tasks: TaskDispatcher, now: int) -> RankActivity:
    rank, death = handle.rank, handle.death
    state, operation, line = "computing" if handle.busy else "idle", "", 0
    waits_for: tuple[int, ...] = ()
    waited = waiting_ns = operations = 0
    if death is not None:
        state, operation = "dead", describe_death(death)
    elif control is not None and rank < control.world_size:
        try:
            slot = control.read_slot(rank)
            if handle.busy and slot.readable and slot.cell == handle.task:
                line = slot.line
                if slot.state is State.WAITING:
                    state, operation, waited = "waiting", slot.operation.name, max(0, now - slot.since_ns)
                    waits_for = _awaited(control, slot)
            timing, former = control.read_timing(rank), tasks.clock.former.get(rank)
            if former is not None:
                waiting_ns = max(0, timing.wait_ns - former.wait_ns) + waited
                operations = max(0, timing.operations - former.operations)
        except ValueError:  # a new epoch has just begun, and this view was closed
            pass
    spent = _spent_ns(rank, tasks, now) if death is None else 0
    return RankActivity(
        rank, handle.pid, state, operation, line, waits_for, waited / 1e9,
        max(0, spent - waiting_ns) / 1e9, waiting_ns / 1e9, operations,
    )  # fmt: skip


def _spent_ns(rank: int, tasks: TaskDispatcher, now: int) -> int:
    """Return how long the last cell took on a rank, or has taken so far; 0 if it took no part."""
    clock, record = tasks.clock, tasks.record
    if rank not in clock.former:
        return 0
    if clock.running:
        return now - clock.began_ns
    notes = record.ranks.get(rank) if record is not None else None
    return notes.ended_ns - notes.began_ns if notes is not None else 0


def _awaited(control: ControlView, slot: SlotRecord) -> tuple[int, ...]:
    """Return who has to come; of a group only its members know where it meets."""
    if slot.peer >= 0:
        return (slot.peer,)
    if not slot.target or slot.area:
        return ()
    words = control.words
    others = (rank for rank in range(control.world_size) if rank != slot.rank)
    return tuple(rank for rank in others if words[control.word_arrive(rank)] < slot.target)
