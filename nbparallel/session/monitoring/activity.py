"""Session activity: what ranks do at this moment, cheap enough to be read several times a second.

It is read from the control segment, from this process and from ``/proc``; no rank is disturbed.  The
supervisor is asked only after a rank has reported memory that it had released.  `statistics` holds more and
takes longer.
"""

from __future__ import annotations

import re
import resource
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbparallel import sharing
from nbparallel.session.monitoring.segments import (
    SharedSegment,
    SharedTotals,
    gather,
    memory_extent,
    names_by_segment,
    released_since,
    reports_released,
    sum_up,
)
from nbparallel.session.monitoring.timeline import awaited_spans
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.processes.elastic_pool import ElasticPool
from nbparallel.session.processes.rank_handle import RankHandle, describe_death
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.results import CellClock, CellRecord, RankTimes
from nbparallel.session.tasks.dispatch import TaskDispatcher
from nbparallel.session.tasks.outcomes import is_waiting, times_now, times_of
from nbparallel.wire.control import ControlView, FailureKind, SlotRecord, State
from nbparallel.wire.control_layout import ARRIVE, ItemRecord
from nbparallel.wire.messages import OperationSpan
from nbparallel.wire.system import ReadText, open_descriptors, process_limit, read_text

# Process memory: what the system says about one process, cheap enough to be read several times a second.
#
# Some facts (proc_pid_status(5)): the counters of ``/proc/PID/status`` need no walk through the pages, as
# those of ``smaps`` do.  Resident memory is the sum of three kinds: *anonymous* memory, which only this
# process sees (of a forked rank also pages that it has not changed since, and that its template still has);
# *shared* memory (memfds and files in ``/dev/shm``), whichever process made it; and pages of files on a
# disk, as of libraries.

_FIELDS = re.compile(r"^(VmRSS|RssAnon|RssShmem|Threads):\s+(\d+)", re.MULTILINE)
_HAS_ENDED = re.compile(r"^State:\s+[ZX]", re.MULTILINE)


def read_memory(pid: int, read: ReadText = read_text) -> dict[str, Any]:
    """Return what the system says of a process, as fields of a `RankActivity`.

    Nothing if it has ended, or the system does not say.
    """
    try:
        text = read(f"/proc/{pid}/status")
    except OSError:
        return {}
    fields = {name: int(value) for name, value in _FIELDS.findall(text)}
    if "VmRSS" not in fields and _HAS_ENDED.search(text):
        return {}  # without that it is ending: no other process can notice it yet
    return {
        "rss_nbytes": fields.get("VmRSS", 0) << 10,
        "private_nbytes": fields.get("RssAnon", 0) << 10,
        "mapped_nbytes": fields.get("RssShmem", 0) << 10,
        "threads": fields.get("Threads", 0),
        "stopped": "\nState:\tT" in text,
    }


# Rank pairs: how long each rank waited for which other one in a cell, and how many bytes went there.

_SENDS = ("send", "isend")
_TAKES = ("recv", "irecv", "barrier", "monitored_barrier")
"""Operations without bytes of their own: the sender's count."""
_TO_ROOT, _FROM_ROOT, _TO_ALL = ("reduce", "gather"), ("broadcast",), ("all_reduce",)


def communication_matrix(record: CellRecord, world_size: int) -> dict[str, Any]:
    """Return which rank waited for which in a cell, and what went where, as fields of a `SessionActivity`.

    Waits are those that were noted, as in the timeline.  Bytes are known if every operation that moved any
    was noted, and shows where they went: messages, `broadcast`, `reduce`, `gather` and `all_reduce`.
    """
    spans = awaited_spans(record)
    waited = [[0.0] * world_size for _ in range(world_size)]
    moved = [[0] * world_size for _ in range(world_size)]
    known = not any(notes.omitted for notes in record.ranks.values()) and not record.died
    for rank, operations in spans.items():
        for span in operations:
            if span.wait_ns and 0 <= span.awaited < world_size:
                waited[rank][span.awaited] += span.wait_ns / 1e9
        known = known and _add_bytes(moved, rank, operations, sorted(record.ranks))
    table = tuple(tuple(row) for row in moved) if known else ()
    return {"waited": tuple(tuple(row) for row in waited), "moved": table}


def _add_bytes(
    moved: Sequence[list[int]], rank: int, spans: Iterable[OperationSpan], world: Sequence[int]
) -> bool:
    """Add what went out from one rank; return whether all of it is known."""
    sums: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
    for span in spans:
        if span.nbytes and span.name not in _TAKES and not span.failed:
            sums[span.name, span.peer, span.group] += span.nbytes
    for (name, peer, group), nbytes in sums.items():
        members = group or world
        root = peer if peer >= 0 else members[0]
        if name in _SENDS:
            targets: Iterable[int] = (peer,)
        elif name in _TO_ROOT:
            targets = () if rank == root else (root,)
        elif name in _FROM_ROOT:
            targets = members if rank == root else ()
        elif name in _TO_ALL:
            targets = members
        else:
            return False
        for target in targets:
            if target != rank or name in _SENDS:
                moved[rank][target] += nbytes
    return True


PATIENCE_SECONDS = 0.05
"""Longest wait for the supervisor's ledger."""
LIMITS_NS = 1_000_000_000
"""Between two looks at the limits of memory."""
_NO_TIMES = RankTimes(0, 0, 0, 0, 0)
_FOLLOWED = {FailureKind.INTERRUPTED: "interrupted", FailureKind.PEER: "released"}


@dataclass(frozen=True, slots=True)
class RankActivity:
    """One rank at one moment."""

    rank: int
    """Its number."""
    pid: int
    """Its process."""
    state: str
    """``idle``, ``starting``, ``computing``, ``waiting``, ``moving`` (in an operation), ``finished`` (its
    part of the cell that still runs is over), ``failed``, ``interrupted``, ``released`` (because another
    rank failed), ``dead`` or ``unseen`` (its host does not answer, or is lost)."""
    operation: str
    """The operation that it waits or moves in; of a dead rank, how it ended; of an unseen one, why it is."""
    line: int
    """The line of the cell that it is on: of its operation, or the first of the statement that it computes; 0
    unknown."""
    waits_for: tuple[int, ...]
    """The ranks that are missing; empty: not known, or any rank will do."""
    seconds: float
    """How long it has been doing that; 0 if it takes no part in a cell, and if that is not known: many short
    operations are not noted one by one."""
    computing: float
    """Seconds of the cell that runs, or ran last, in which it neither waited nor moved."""
    waiting: float
    """Seconds of that cell in which it waited."""
    operations: int | None
    """Operations of that cell that have ended; None: not known now (many short ones are counted later)."""
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
    """Shared memory that its process has touched, in bytes, whichever process made it."""
    last_line: int = 0
    """The last line of the statement that it computes, which may be a whole loop; 0 unknown."""
    host: str = ""
    """The name of its host; empty: this machine."""
    rss_nbytes: int = 0
    """Resident memory, shared pages included."""
    threads: int = 0
    """Threads of the process."""
    task: int = 0
    """Number of the task that it runs or ran last."""
    stopped: bool = False
    """Whether its process was stopped (SIGSTOP)."""
    items: int = 0
    """Of a function that is mapped over items: how many it has done."""
    item: int = -1
    """The index of the item that it took last; -1: none."""
    step: int = 0
    """How far its bar of tqdm is."""
    steps: int = 0
    """How long that is; 0: it shows none."""
    seconds_left: float = 0.0
    """Until the bar's end, if it goes on as it went."""
    inside: int = 0
    """The line on which it computes, of a statement of several that communicates; 0 unknown."""


RankStatistics = RankActivity
"""What `Session.statistics` has for each rank; there a state may be ``stopped``, too."""


@dataclass(frozen=True, slots=True)
class SessionActivity:
    """A session at one moment."""

    running: bool
    """Whether a cell is on the ranks."""
    number: int
    """The ``In[n]`` of the cell that runs, or ran last; 0: none yet, or a call."""
    seconds: float
    """How long it has been running; or when its last rank had ended it."""
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
    failed_between: str = ""
    """What went wrong between ranks, in a line; empty if it failed on that rank alone."""
    limit_nbytes: int | None = None
    """Bytes of shared memory that the machine, or the container, allows in all; None if unknown."""
    culprits: tuple[int, ...] = ()
    """Ranks that others wait for, and that wait for none."""
    waited: tuple[tuple[float, ...], ...] = ()
    """``waited[i][j]``: seconds of the last cell in which rank i waited for rank j; empty: not known."""
    moved: tuple[tuple[int, ...], ...] = ()
    """``moved[i][j]``: bytes of the last cell that went from rank i to rank j; empty: not known."""
    began_ns: int = 0
    """When the cell was sent, by `time.monotonic_ns`: no two cells have the same; 0: none yet."""
    items: int = 0
    """How many items a function is mapped over; 0: it is no map; -1: a map of unknown length."""
    memory_nbytes: int | None = None
    """Bytes of memory of the machine, or the container, with what it swaps to; None if unknown."""
    member: str = "rank"
    """What its ranks are; of a pool, as a panel shows it, each is a ``worker``."""


class ActivityReader:
    """Reads the activity of one session, from any thread."""

    def __init__(self, ranks: ElasticPool, names: NameDelivery, tasks: TaskDispatcher) -> None:
        self._ranks, self._names, self._tasks = ranks, names, tasks
        self._totals = SharedTotals(0, 0, 0, {})
        self._limit: tuple[int, int | None, int | None] = (-LIMITS_NS, None, None)
        self._pairs: tuple[CellRecord | None, dict[str, Any]] = (None, {})

    def read(self) -> SessionActivity:
        """Return what happens now; waits for no rank.

        Raises
        ------
        RuntimeError
            No ranks are running, nor being started.
        """
        starting, moving = self._ranks.starting, self._names.moving
        clock, record = self._tasks.clock, self._tasks.record
        pool = self._ranks.pool if starting else self._ranks.running
        if moving is None:  # else another thread has locked the store for as long as that takes
            self._totals = self._sum_up(pool)
        totals = self._totals
        if record is not None and record.task != clock.task:
            record = None
        now = time.monotonic_ns()
        if pool is None:
            ranks = tuple(_starting(rank, 0) for rank in starting)
        else:
            look = _ActivitySnapshot(pool.control, clock, record, starting, totals, now)
            ranks = tuple(look.rank(handle) for handle in list(pool.handles))
        pairs: tuple[CellRecord | None, dict[str, Any]] = (None, {})
        if record is not None and not clock.running and not self._ranks.place.parts:  # one part has no matrix
            pairs = self._pairs
            if pairs[0] is not record:
                pairs = self._pairs = record, communication_matrix(record, len(ranks))
        return SessionActivity(
            running=clock.running,
            number=clock.number,
            seconds=_seconds(clock, record, ranks, now),
            ranks=ranks,
            strategy=sharing.get_sharing_strategy(),
            segments=totals.segments,
            nbytes=totals.nbytes,
            pooled_nbytes=totals.pooled_nbytes,
            **phase_fields(clock, starting, moving),
            limit_nbytes=self._limit_nbytes(now),
            culprits=culprits_of(ranks),
            **pairs[1],
            memory_nbytes=self._limit[2],
        )

    def _sum_up(self, pool: RankPool | None) -> SharedTotals:
        store = sharing.current_store()
        if pool is None:
            return sum_up(store.segments(fetched=False), (), ())
        handles, ledger = list(pool.handles), None
        if reports_released(handles):
            ledger = pool.supervisor.ledger(PATIENCE_SECONDS)
        gone = () if ledger is None else released_since(ledger, handles)
        return sum_up(store.segments(fetched=False), handles, gone)

    def _limit_nbytes(self, now: int) -> int | None:
        """Return what can be shared in all, as of the last second: reading limits of memory takes a while."""
        if now >= self._limit[0] + LIMITS_NS:
            free, whole = memory_extent()
            totals = self._totals
            limit = None if free is None else totals.nbytes + totals.pooled_nbytes + free
            self._limit = now, limit, whole
        return self._limit[1]


@dataclass(frozen=True, slots=True)
class _ActivitySnapshot:
    """One look at all ranks."""

    control: ControlView | None
    clock: CellClock
    record: CellRecord | None
    """Of the same cell; None while it runs."""
    starting: Sequence[int]
    totals: SharedTotals
    now: int

    def rank(self, handle: RankHandle) -> RankActivity:
        """Return what one rank does."""
        rank = handle.rank
        if handle.death is None and (rank in self.starting or not handle.usable):
            return _starting(rank, handle.pid)
        state, operation, line, since, times = "idle", "", 0, self.now, _NO_TIMES
        waits_for: tuple[int, ...] = ()
        last_line, inside, items = 0, 0, ItemRecord(0, -1, 0)
        try:
            if handle.death is None:
                state, operation, line, since, waits_for, last_line = self._state(handle)
                if last_line > line and self.control is not None:
                    # here: it brings all operations
                    from nbparallel.distributed.runtime.peer_memory import line_inside

                    inside = line_inside(self.control, handle.pid, rank)
            times = self._times(handle)
            items = self._items(rank) or items
        except ValueError:  # a new epoch has just begun, and this view was closed
            pass
        if handle.death is not None:
            state, operation = "dead", describe_death(handle.death)
        return RankActivity(
            rank=rank,
            pid=handle.pid,
            state=state,
            operation=operation,
            line=line,
            waits_for=waits_for,
            seconds=max(0, self.now - since) / 1e9,
            computing=times.computing_ns / 1e9,
            waiting=times.waiting_ns / 1e9,
            operations=times.operations,
            moving=times.moving_ns / 1e9,
            finished=times.finished_ns / 1e9,
            shared_nbytes=self.totals.by_rank.get(rank, 0),
            last_line=last_line,
            inside=inside,
            task=handle.task,
            items=0 if items.steps else items.done,
            item=items.current,
            step=items.done if items.steps else 0,
            steps=items.steps,
            seconds_left=(self.now - items.began_ns) / 1e9 * (items.steps / max(1, items.done) - 1),
            **(read_memory(handle.pid) if handle.death is None else {}),
        )

    def _items(self, rank: int) -> ItemRecord | None:
        """Return how far a rank is in the items of this cell, if it has any."""
        control = self.control
        if control is None or rank >= control.world_size:
            return None
        record = ItemRecord.read(control.words, control.layout, rank)
        return record if record.task == self.clock.task else None

    def _state(self, handle: RankHandle) -> tuple[str, str, int, int, tuple[int, ...], int]:
        """Return state, operation, line, since when, the ranks that it waits for, and the last line."""
        rank, control, nothing = handle.rank, self.control, (self.now, (), 0)
        if not handle.busy and not (self.clock.running and rank in self.clock.ranks):
            ends = {} if self.record is None else self.record.ends
            return (ends.get(rank, "idle"), "", 0, *nothing)
        if control is None or rank >= control.world_size:
            return ("computing" if handle.busy else "idle", "", 0, *nothing)
        slot, timing = control.read_slot(rank), control.read_timing(rank)
        if not slot.readable or slot.cell != handle.task:
            return ("computing", "", 0, *nothing)
        if slot.state is State.FINISHED:
            return ("finished", "", 0, slot.since_ns, (), 0)
        if slot.state is State.FAILED:
            failure = control.read_failure(rank)
            state = "failed" if failure is None else _FOLLOWED.get(failure.kind, "failed")
            return (state, "", 0, slot.since_ns, (), 0)
        if is_waiting(slot, handle.task):
            missing = _awaited(control, slot) or (timing.awaited if slot.area else ())
            return ("waiting", slot.operation.name, slot.line, slot.since_ns, missing, 0)
        if timing.cell != handle.task:
            return ("computing", "", slot.line, slot.since_ns, (), slot.last_line)
        if timing.begin_ns:
            name = timing.operation.name if timing.operation else ""
            return ("moving", name, slot.line, timing.begin_ns, (), 0)
        since = self.now if timing.uncounted else max(slot.since_ns, timing.ended_ns)
        return ("computing", "", slot.line, since, (), slot.last_line)

    def _times(self, handle: RankHandle) -> RankTimes:
        clock, record, rank = self.clock, self.record, handle.rank
        if rank not in clock.ranks:
            return _NO_TIMES
        if record is not None and (notes := record.ranks.get(rank)) is not None:
            return times_of(notes, clock.began_ns)
        if record is not None and rank in record.times:
            return record.times[rank]
        if self.control is None or rank >= self.control.world_size:
            return _NO_TIMES
        until = self.now if clock.running else clock.ended_ns
        died = handle.death is not None
        if handle.death is not None:
            until = min(until, int(handle.death.seen * 1e9))
        return times_now(self.control, rank, clock.task, clock.began_ns, until, died=died)


def _seconds(clock: CellClock, record: CellRecord | None, ranks: Sequence[RankActivity], now: int) -> float:
    """Return how long a cell has been running, or when its last rank had ended it."""
    if clock.running:
        return (now - clock.began_ns) / 1e9
    if record is None:
        return (clock.ended_ns - clock.began_ns) / 1e9
    return max((rank.finished for rank in ranks), default=0.0)


def _starting(rank: int, pid: int) -> RankActivity:
    return RankActivity(rank, pid, "starting", "", 0, (), 0.0, 0.0, 0.0, 0)


def _awaited(control: ControlView, slot: SlotRecord) -> tuple[int, ...]:
    """Return the ranks that are missing; the slots of a group are known to its members only."""
    if slot.peer >= 0:
        return (slot.peer,)
    if not slot.target or slot.area:
        return ()
    words = control.words
    return tuple(
        rank
        for rank in range(control.world_size)
        if rank != slot.rank and words[control.word(rank, ARRIVE)] < slot.target
    )


def phase_fields(clock: CellClock, starting: Sequence[int], moving: tuple[str, int] | None) -> dict[str, Any]:
    """Return the fields of a `SessionActivity` that say what goes on before a cell, and what failed in it."""
    return {
        "phase": "starting" if starting else "moving" if moving is not None else clock.phase,
        "moving_name": "" if moving is None else moving[0],
        "moving_nbytes": 0 if moving is None else moving[1],
        "starting_ranks": len(starting),
        "failed_rank": clock.failed_rank,
        "failed_line": clock.failed_line,
        "failed_between": clock.failed_between,
        "began_ns": clock.began_ns,
        "items": clock.items,
    }


def culprits_of(ranks: Sequence[RankActivity]) -> tuple[int, ...]:
    """Return the ranks that others wait for, and that wait for none."""
    waiting = {rank.rank for rank in ranks if rank.state == "waiting"}
    return tuple(sorted({other for rank in ranks for other in rank.waits_for} - waiting))


# Statistics: a frozen picture of ranks, segments and limits, which asks the supervisor as well.


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
        ranks=tuple(map(_statistics_of, activity.ranks)),
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


def _statistics_of(seen: RankActivity) -> RankActivity:
    """Return a rank with ``stopped`` for its state where that is so, and without how it died."""
    if seen.state == "dead":
        return replace(seen, operation="")
    return replace(seen, state="stopped") if seen.stopped and seen.state != "starting" else seen
