"""Session activity: what ranks do at this moment, cheap enough to be read several times a second.

It is read from the control segment and from this process; no other process is involved.  `statistics`
holds more and takes longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from nbparallel import sharing
from nbparallel.session.processes.rank_exit import describe_exit
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.results import CellClock, CellRecord
from nbparallel.wire.control import ControlView, SlotRecord, State


@dataclass(frozen=True, slots=True)
class RankActivity:
    """One rank at one moment."""

    rank: int
    """Its number."""
    pid: int
    """Its process."""
    state: str
    """``idle``, ``starting``, ``computing``, ``waiting``, ``moving`` (in an operation), ``finished`` (its part
    of the cell that still runs is over), ``failed``, ``interrupted`` or ``dead``."""
    operation: str
    """The operation that it waits in; of a dead rank, how it ended."""
    line: int
    """The line of the cell that it is on; 0 unknown."""
    waits_for: tuple[int, ...]
    """The ranks that are missing; empty: not known, or any rank will do."""
    seconds: float
    """How long it has been waiting; 0 if it is not."""
    computing: float
    """Seconds of the cell that runs, or ran last, in which it did not wait."""
    waiting: float
    """Seconds of that cell in which it waited."""
    operations: int | None
    """Operations of that cell; None: not known now."""
    moving: float = 0.0
    """Seconds of that cell in which it was in operations and did not wait.  Together with `computing` and
    `waiting` its time so far."""
    finished: float = 0.0
    """Seconds from the beginning of that cell to when it had ended its part; 0 while it has not."""
    shared_nbytes: int = 0
    """Bytes of the segments that it made."""
    private_nbytes: int = 0
    """Anonymous memory of its process in bytes: what no other process sees."""
    mapped_nbytes: int = 0
    """Shared memory that its process has touched, in bytes, whoever made it."""


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
    phase: str = "none"
    """``none`` (no cell yet), ``starting``, ``moving`` (an array goes into shared memory), ``running``,
    ``finished``, ``failed`` or ``interrupted``."""
    moving_name: str = ""
    """The notebook's name of the array that is being moved."""
    moving_nbytes: int = 0
    """Its bytes."""
    starting_ranks: int = 0
    """How many ranks are being started."""
    failed_rank: int = -1
    """The rank that the cell failed on first; -1: none."""
    failed_line: int = 0
    """The line of the cell on which it did; 0 unknown."""
    limit_nbytes: int | None = None
    """Bytes of shared memory that the machine, or the container, allows in all; None if unknown."""
    culprits: tuple[int, ...] = ()
    """Ranks that others wait for, and that wait for none."""
    waited: tuple[tuple[float, ...], ...] = ()
    """``waited[i][j]``: seconds of the last cell in which rank i waited for rank j; empty: not known."""
    moved: tuple[tuple[int, ...], ...] = ()
    """``moved[i][j]``: bytes of the last cell that went from rank i to rank j; empty: not known."""


def read_activity(pool: RankPool, clock: CellClock, record: CellRecord | None) -> SessionActivity:
    """Return what happens now; never waits, from any thread."""
    here = sharing.current_store().segments(pool.supervisor.broker)
    made = [segment.nbytes for segment in here if segment.own and segment.phase != "pooled"]
    pooled = sum(segment.nbytes for segment in here if segment.phase == "pooled")
    handles = list(pool.handles)
    memories = [handle.memory for handle in handles if handle.alive]
    now = time.monotonic_ns()
    return SessionActivity(
        running=clock.running,
        number=clock.number,
        seconds=((now if clock.running else clock.ended_ns) - clock.began_ns) / 1e9,
        ranks=tuple(_rank(handle, pool.control, clock, record, now) for handle in handles),
        strategy=sharing.get_sharing_strategy(),
        segments=len(made) + sum(memory.count for memory in memories),
        nbytes=sum(made) + sum(memory.nbytes for memory in memories),
        pooled_nbytes=pooled + sum(memory.pooled_nbytes for memory in memories),
    )


def _rank(
    handle: RankHandle, control: ControlView | None, clock: CellClock, record: CellRecord | None, now: int
) -> RankActivity:
    rank, end = handle.rank, handle.death
    state, operation, line = "computing" if handle.busy else "idle", "", 0
    waits_for: tuple[int, ...] = ()
    waited = waiting_ns = operations = 0
    if end is not None:
        state, operation = "dead", describe_exit(end)
    elif control is not None and rank < control.world_size:
        try:
            slot = control.read_slot(rank)
            if handle.busy and slot.readable and slot.cell == handle.task:
                line = slot.line
                if slot.state is State.WAITING:
                    state, operation, waited = "waiting", slot.operation.name, max(0, now - slot.since_ns)
                    waits_for = _awaited(control, slot)
            timing, former = control.read_timing(rank), clock.former.get(rank)
            if former is not None:
                waiting_ns = max(0, timing.wait_ns - former.wait_ns) + waited
                operations = max(0, timing.operations - former.operations)
        except ValueError:  # a new epoch has just begun, and this view was closed
            pass
    spent = _spent_ns(rank, clock, record, now) if end is None else 0
    return RankActivity(
        rank, handle.pid, state, operation, line, waits_for, waited / 1e9,
        max(0, spent - waiting_ns) / 1e9, waiting_ns / 1e9, operations,
    )  # fmt: skip


def _spent_ns(rank: int, clock: CellClock, record: CellRecord | None, now: int) -> int:
    """Return how long the last cell took on a rank, or has taken so far; 0 if the rank took no part."""
    if rank not in clock.former:
        return 0
    if clock.running:
        return now - clock.began_ns
    notes = record.ranks.get(rank) if record is not None else None
    return notes.ended_ns - notes.began_ns if notes is not None else 0


def _awaited(control: ControlView, slot: SlotRecord) -> tuple[int, ...]:
    """Return the ranks that are missing; the slots of a group are known to its members only."""
    if slot.peer >= 0:
        return (slot.peer,)
    if not slot.target or slot.area:
        return ()
    words = control.words
    others = (rank for rank in range(control.world_size) if rank != slot.rank)
    return tuple(rank for rank in others if words[control.word_arrive(rank)] < slot.target)
