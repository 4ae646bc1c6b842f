"""Outcomes of a task: the `CellResult` that they make, or the error that the cell raises."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from nbparallel.errors import (
    RANKS_INTERRUPTED,
    CellTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    FileDescriptorLimitError,
    ProtocolError,
    RankDiedError,
    SharedMemoryFullError,
    grouped,
    rank_list,
)
from nbparallel.session.processes.rank_handle import RankDeath, RankHandle, describe_death, stderr_excerpt
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.results import (
    CellRecord,
    CellResult,
    DrawnValues,
    RankResult,
    RankTimes,
    RankValues,
    RemoteValue,
)
from nbparallel.session.tasks import parallel_error
from nbparallel.session.tasks.task_run import TaskRun
from nbparallel.transfer.pickling import dump_error
from nbparallel.wire.control import ControlView, SlotRecord, State
from nbparallel.wire.control_layout import OPERATION_BITS, RECORD, RECORD_ALIGN
from nbparallel.wire.frames import Kind
from nbparallel.wire.inspection import MessageReport, SentMessage, is_users
from nbparallel.wire.messages import (
    Cause,
    CellTask,
    DrawTask,
    MessageSettlement,
    Outcome,
    RankFailure,
    RankTimeline,
    ScriptTask,
)
from nbparallel.wire.system import signal_of

# Cell times: where each rank's time in a cell has gone, while it runs and when it has ended.
#
# This is the only place that computes it.  Panel, timeline, status and statistics show what it returns::
#
#     while a rank runs its part   TimingRecord and state slot, which the rank writes        times_now
#     when it has reported         RankTimeline, with the same counters at the rank's end    times_of
#
# A rank's time begins for all ranks when the cell is sent.

ENDED = (State.FINISHED, State.FAILED)
_TRIES = 4


def times_of(notes: RankTimeline, began_ns: int) -> RankTimes:
    """Return the times of a rank that has ended a cell, which began at `began_ns`."""
    whole = max(0, notes.ended_ns - began_ns)
    return _times(whole, notes.wait_ns, notes.moving_ns, whole, notes.operations)


def times_now(
    control: ControlView, rank: int, task: int, began_ns: int, now: int, *, died: bool = False
) -> RankTimes:
    """Return the times of a rank in a cell so far, as far as it has published them.

    Parameters
    ----------
    now : int
        The time, by `time.monotonic_ns`; of a rank that `died`, when it did.
    """
    slot = control.read_slot(rank)
    timing = control.read_timing(rank)
    for _ in range(_TRIES):
        again = control.read_slot(rank)
        if again.version == slot.version:
            break
        slot, timing = again, control.read_timing(rank)
    ended = slot.readable and slot.cell == task and slot.state in ENDED
    whole = max(0, (slot.since_ns if ended else now) - began_ns)
    finished = whole if ended or died else 0
    if timing.cell != task:  # it has not begun
        return _times(whole, 0, 0, finished, 0)
    waiting, moving = timing.wait_ns, timing.moving_ns
    if not ended:
        waits_since = max(slot.since_ns, timing.as_of_ns) if is_waiting(slot, task) else now
        waiting += now - waits_since
        if timing.begin_ns:
            inside = timing.as_of_ns > timing.begin_ns + OPERATION_BITS
            moving += waits_since - timing.begin_ns - (timing.operation_wait_ns if inside else 0)
    return _times(whole, waiting, moving, finished, None if timing.uncounted else timing.operations)


def is_waiting(slot: SlotRecord, task: int) -> bool:
    """Whether a rank waits in an operation of a cell."""
    return slot.readable and slot.cell == task and slot.state is State.WAITING


def _times(whole: int, waiting: int, moving: int, finished: int, operations: int | None) -> RankTimes:
    """Return the parts of a rank's whole time: what is neither waiting nor moving is computing."""
    waiting = min(max(0, waiting), whole)
    moving = min(max(0, moving), whole - waiting)
    return RankTimes(whole - waiting - moving, waiting, moving, finished, operations)


__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here
NOT_ASKED = "its value was not asked for"
"""Why a value stayed on its rank although it could have travelled."""


def values_of(run: TaskRun, loads: Callable[[Any], Any]) -> dict[int, Any]:
    """Return the values of a task by rank; `loads` rebuilds each, once."""
    return {rank: _value(end, loads) for rank, end in sorted(run.outcomes.items()) if end.has_value}


def missing_values_notes(values: Mapping[int, Any]) -> list[str]:
    """Return a line for each reason for which values that were asked for stayed on their ranks."""
    by_reason = grouped(
        (value.reason, rank)
        for rank, value in values.items()
        if isinstance(value, RemoteValue) and value.reason != NOT_ASKED
    )
    return [
        f"the value{'s' * (len(ranks) > 1)} of {rank_list(ranks)} stayed there, and text stands for "
        f"{'each' if len(ranks) > 1 else 'it'}: {reason}"
        for reason, ranks in by_reason.items()
    ]


def result_of(run: TaskRun, values: Mapping[int, Any]) -> CellResult:
    """Return the result of a task, failed or not."""
    ranks: dict[int, RankResult] = {}
    seconds = time.monotonic() - run.request.started
    for rank in sorted({*run.outcomes, *run.deaths}):
        outcome = run.outcomes.get(rank)
        ranks[rank] = RankResult(
            rank=rank,
            value=values.get(rank),
            text=outcome.text if outcome is not None else "",
            stdout=run.output.text(rank, "stdout"),
            stderr=run.output.text(rank, "stderr"),
            displays=run.output.displays(rank),
            seconds=outcome.wall_ns / 1e9 if outcome is not None else seconds,
            wait_seconds=outcome.wait_ns / 1e9 if outcome is not None else 0.0,
            error=None,
            cpu_seconds=outcome.cpu_ns / 1e9 if outcome is not None else 0.0,
        )
    names = run.request.preparation
    copied, shared = ({}, {}) if names is None else (names.copied_nbytes, names.shared_nbytes)
    return CellResult(
        RankValues(values),
        ranks,
        seconds,
        tuple(run.request.notes),
        copied,
        shared,
        _drawn(run),
        run.findings(),
    )


def _drawn(run: TaskRun) -> DrawnValues | None:
    """Return the beginnings of the variables that the task was asked for."""
    task = run.task
    names = task.draw if isinstance(task, CellTask | DrawTask) else ()
    if not names:
        return None
    return DrawnValues(
        names=names,
        ranks={rank: end.drawn for rank, end in sorted(run.outcomes.items()) if end.drawn is not None},
        died={rank: describe_death(end) for rank, end in run.deaths.items()},
        number=task.execution_count if isinstance(task, CellTask) else 0,
    )


def _value(outcome: Outcome, loads: Callable[[Any], Any]) -> Any:
    if outcome.value is None:
        return RemoteValue(outcome.rank, outcome.text, outcome.value_error or NOT_ASKED)
    try:
        return loads(outcome.value)
    except Exception as error:  # noqa: BLE001  rebuilding runs code of the user's classes
        reason = f"it cannot be rebuilt in the notebook: {type(error).__name__}: {error}"
        lack = error if isinstance(error, FileDescriptorLimitError | SharedMemoryFullError) else None
        if lack is not None:
            lack.__traceback__ = lack.__cause__ = lack.__context__ = None
        return RemoteValue(outcome.rank, outcome.text, reason, lack)


def record_of(run: TaskRun, began_ns: int) -> CellRecord:
    """Return the ranks' notes on a task that ran code of the user's, for its timeline."""
    number: int = 0
    source: tuple[str, ...] = ()
    task = run.task
    if isinstance(task, CellTask):
        number, source = task.execution_count, ("",) * task.line_offset + tuple(task.source.split("\n"))
    return CellRecord(
        number=number,
        source=source,
        ranks={rank: outcome.timeline for rank, outcome in run.outcomes.items() if outcome.timeline},
        died={rank: describe_death(end) for rank, end in run.deaths.items()},
        task=run.request.number,
        began_ns=began_ns,
        ends=_endings(run),
        cpu_ns=sum(outcome.cpu_ns for outcome in run.outcomes.values()),
        times={
            rank: times_now(run.control, rank, run.request.number, began_ns, int(end.seen * 1e9), died=True)
            for rank, end in run.deaths.items()
            if rank < run.control.world_size
        },
    )


def _endings(run: TaskRun) -> dict[int, str]:
    """Return how the ranks' parts of a cell ended that did not succeed."""
    unfinished = {rank: outcome.failure for rank, outcome in run.outcomes.items() if not outcome.ok}
    own = {
        rank
        for rank, failure in unfinished.items()
        if isinstance(failure, RankFailure) and failure.cause not in (Cause.PEER, Cause.INTERRUPT)
    }
    stopped = run.escalation.interrupted or run.escalation.timed_out or not (own or run.deaths)
    other = "interrupted" if stopped else "released"
    return {rank: "failed" if rank in own else other for rank in unfinished}


_BETWEEN_RANKS = (CollectiveMismatchError.__name__, DeadlockError.__name__)
"""Errors that are not the fault of the rank that raises them first."""


def ending_of(error: BaseException) -> dict[str, Any]:
    """Return how a task ended that raised `error` in the notebook: fields of a `CellClock`."""
    if isinstance(error, KeyboardInterrupt | CellTimeoutError):
        return {"phase": "interrupted"}
    failures = getattr(error, "failures", None)
    if not failures:
        return {"phase": "failed"}
    rank, failure = next(iter(failures.items()))  # the root cause comes first
    between = failure.evalue.partition("\n")[0].rstrip(":") if failure.ename in _BETWEEN_RANKS else ""
    return {
        "phase": "failed",
        "failed_rank": rank,
        "failed_line": failure.line or 0,
        "failed_between": between,
    }


def raise_if_failed(run: TaskRun, result: CellResult, raised: BaseException | None = None) -> None:
    """Raise the error of a task, with `result` attached; return if it succeeded.

    Parameters
    ----------
    raised : BaseException, optional
        What the program's own code raised while it waited for the ranks, which were interrupted therefore.

    Raises
    ------
    BaseException
        That, with a note on where each rank was.
    KeyboardInterrupt
        The user interrupted; it carries ``.result``, and ``.failures``: where each rank was.
    CellTimeoutError
        The time-out passed.
    ParallelError
        Ranks failed; one key for every rank that raised, the root cause first.
    """
    escalation = run.escalation
    failed: dict[int, RankFailure] = {}
    freed: dict[int, str] = {}
    unfinished: dict[int, RankFailure] = {}
    for rank, outcome in run.outcomes.items():
        if outcome.ok:
            continue
        unfinished[rank] = outcome.failure
        stopped = rank in escalation.interrupted_for_peer or escalation.interrupted or escalation.timed_out
        if outcome.interrupted and stopped:
            freed[rank] = parallel_error.lines_of([outcome.failure])
        elif isinstance(outcome.failure, RankFailure):
            failed[rank] = replace(outcome.failure, item=_item(run, rank))
    for rank, end in run.deaths.items():
        failed[rank] = unfinished[rank] = death_failure(run.handles[rank], end, run.control, _item(run, rank))
    unfinished = dict(sorted(unfinished.items()))
    if raised is not None:
        if unfinished:
            raised.add_note(f"{RANKS_INTERRUPTED}{parallel_error.whereabouts(unfinished)}")
        raise raised
    if escalation.interrupted:
        interrupt = KeyboardInterrupt(f"the cell was interrupted{parallel_error.whereabouts(unfinished)}")
        interrupt.result = result  # type: ignore[attr-defined]
        interrupt.failures = unfinished  # type: ignore[attr-defined]
        raise interrupt
    if escalation.timed_out:
        raise CellTimeoutError(
            f"the cell ran longer than its time-out of {escalation.timeout:g} s and was interrupted"
            f"{parallel_error.whereabouts(unfinished)}",
            result=result,
            failures=unfinished,
        )
    if failed:
        error = parallel_error.build_parallel_error(failed, freed, result)
        if run.request.options.sink is None:  # nothing else has shown them
            for note in result.notes:
                error.add_note(f"note: {note}")
        raise error


def _item(run: TaskRun, rank: int) -> str:
    watch = run.request.watch
    return "" if watch is None else watch.place(run.control, rank)


def death_failure(handle: RankHandle, end: RankDeath, control: ControlView, item: str = "") -> RankFailure:
    """Return the failure of a rank whose process ended, while it was at `item`."""
    phase = ""
    slot = control.read_slot(handle.rank)
    line = slot.line or None if slot.readable else None
    where = f" on line {line}" if line else ""
    if slot.readable and slot.state is State.WAITING:
        phase = f" in {slot.operation.name.lower()}{where}"
    elif slot.readable and slot.state is State.COMPUTING and line:
        phase = f" in user code{where}"
    tail, crash_line = stderr_excerpt(handle.stderr_tail)
    if crash_line is not None:
        line, phase = crash_line, f" in user code on line {crash_line}"
    if item:
        phase = f" at {item}{phase}"
    place = f",{phase}," if phase else ""
    message = f"{rank_list([handle.rank])} (process {end.pid}){place} {describe_death(end)}"
    if tail:
        message += f"; the end of its stderr:\n{tail}"
    name = signal_of(end.code)
    error: Exception = RankDiedError(
        message,
        rank=handle.rank,
        pid=end.pid,
        exit_code=None if name else end.code,
        signal_name=name,
        line=line,
        stderr=tail,
    )
    if handle.protocol_error:
        error = ProtocolError(message)
    return RankFailure(
        rank=handle.rank,
        time_ns=int(end.seen * 1e9),
        ename=type(error).__name__,
        evalue=message,
        exception=dump_error(error),
        traceback=(),
        frames=(),
        cause=Cause.DIED,
        item=item,
    )


# Messages that a cell has left: what ranks sent in it and no rank received, reported, then dropped or kept.
#
# When the last rank has ended a cell, nothing moves in the rings any more.  What is left lies in two
# places: in a ring, which the kernel reads, and in the queue of its receiver, which the rank reports with
# its outcome.  Ranks that have sent nothing report nothing, and then nothing is read.  A rank is sent how
# far in its rings the cell reaches, and drops or keeps what lies before: whatever another rank has sent
# since lies behind.

MOST_LISTED = 4
"""Pairs of ranks that a line lists."""
Messages = Mapping[SentMessage, int]
"""How many there are of each kind."""
Pair = tuple[int, int]
"""Source and destination."""


class UnreceivedMessages:
    """The messages that are left when a cell ends, for one session."""

    def __init__(self) -> None:
        self._control: ControlView | None = None
        self._settled: dict[Pair, int] = {}
        """Up to where rings were read: a rank may not have taken out yet what it is to keep."""
        self._kept: dict[int, Counter[SentMessage]] = {}
        """What stays, by destination."""

    def begin(self, control: ControlView) -> list[str]:
        """Begin a task in an epoch; returns a line on messages that were lost with the last one."""
        if control is self._control:
            return []
        self._control = control
        self._settled.clear()
        lost = sum(self._kept.values(), Counter())
        self._kept.clear()
        if not lost:
            return []
        return [
            f"{_so_many(lost, ' of earlier cells')} dropped, because a cell failed or the ranks "
            f"changed: {_listed(lost)}"
        ]

    def end(self, run: TaskRun, *, failed: bool, keep: bool) -> list[str]:
        """Settle what a task has left, when all of its ranks have ended it; returns lines for the user.

        Parameters
        ----------
        failed : bool
            What the task has left ends with its epoch.
        keep : bool
            Messages stay for later cells, also those to ranks that took part.
        """
        reports = {r: o.messages for r, o in run.outcomes.items() if o.messages is not None}
        pairs = run.closing()
        if not reports and not self._kept and not pairs:
            return []
        for rank in run.outcomes:
            self._kept.pop(rank, None)
            queued = reports[rank].queued if rank in reports else ()
            if kept := {message: count for message, count in queued if message.cell}:
                self._kept[rank] = Counter(kept)
        late = {message: count for report in reports.values() for message, count in report.late}
        notes = [f"{_so_many(late, ' of earlier cells')} received: {_listed(late)}"] if late else []
        here = run.rank_pool.ranks
        pairs += [(r, to) for r, report in reports.items() for to in report.destinations if to in here]
        left = Counter() if failed else self._left(run.control, reports, pairs)
        if not left:
            return notes
        dropped = {m: n for m, n in left.items() if m.destination in run.handles and not keep}
        staying = {m: n for m, n in left.items() if m not in dropped}
        cell = f"In[{run.task.execution_count}]" if isinstance(run.task, CellTask) else "an earlier call"
        label = next((report.label for report in reports.values()), "")
        self.settle(run.rank_pool, run.control, cell, label, dropped, staying)
        return [*notes, *_lines(dropped, staying, run, label)]

    def _left(
        self, control: ControlView, reports: Mapping[int, MessageReport], pairs: Iterable[Pair]
    ) -> Counter[SentMessage]:
        """Return what the task has left in queues, and in the rings of pairs of ranks."""
        left: Counter[SentMessage] = Counter()
        for report in reports.values():
            left.update({message: count for message, count in report.queued if not message.cell})
        for pair in pairs:
            left.update(in_ring(control, *pair, self._settled.get(pair, 0)))
        return left

    def settle(
        self,
        pool: RankPool,
        control: ControlView,
        cell: str,
        label: str,
        dropped: Messages,
        kept: Messages,
    ) -> None:
        """Send ranks what becomes of messages, those of `dropped` and `kept`."""
        words, layout = control.words, control.layout
        for message, count in kept.items():
            stays = self._kept.setdefault(message.destination, Counter())
            stays[replace(message, cell=cell)] += count
        pairs = {(m.source, m.destination) for m in (*dropped, *kept)}
        ends = {pair: words[layout.tail_word(*pair)] for pair in pairs}
        self._settled.update(ends)
        staying = {(m.source, m.destination) for stays in self._kept.values() for m in stays}
        gone = {(m.source, m.destination) for m in dropped}
        listed = _listed(dropped, label)
        remark = f"; when {cell} ended, {_so_many(dropped)} dropped: {listed}"
        to_drop = grouped((to, source) for source, to in gone)
        to_keep = grouped((to, source) for source, to in pairs - gone)
        released = grouped(gone - staying)
        for rank, handle in zip(pool.ranks, pool.handles, strict=True):
            settlement = MessageSettlement(
                cell,
                tuple((source, ends[source, rank]) for source in to_drop.get(rank, ())),
                tuple((source, ends[source, rank]) for source in to_keep.get(rank, ())),
                tuple(released.get(rank, ())),
                remark if dropped else "",
            )
            if dropped or settlement.kept:
                handle.send(Kind.SETTLE_MESSAGES, settlement, epoch=pool.epoch)


def in_ring(control: ControlView, source: int, destination: int, start: int = 0) -> Iterator[SentMessage]:
    """Yield the messages that lie in a ring behind the position `start`, while no rank uses it."""
    words, layout = control.words, control.layout
    capacity, begin = layout.ring_capacity, layout.ring_byte(source, destination)
    position = max(start, words[layout.head_word(source, destination)])
    while position < words[layout.tail_word(source, destination)]:
        offset = position % capacity
        head = bytes(control.octets[begin + offset : begin + min(offset + RECORD.size, capacity)])
        head += bytes(control.octets[begin : begin + RECORD.size - len(head)])
        length, _, _, tag, line, group = RECORD.unpack(head)
        if length < RECORD.size:
            return  # damaged: the rank that takes it reports that
        if tag >= 0 and is_users(group):
            yield SentMessage(source, destination, tag, line, bool(group))
        position += (length + RECORD_ALIGN - 1) & -RECORD_ALIGN


def _lines(dropped: Messages, kept: Messages, run: TaskRun, label: str) -> Iterator[str]:
    """Yield a line on what was dropped, on what stays, and on what waits for ranks that took no part."""
    task, absent = run.task, {m: n for m, n in kept.items() if m.destination not in run.handles}
    if dropped:
        what = "cell" if isinstance(task, CellTask) else "script" if isinstance(task, ScriptTask) else "call"
        how = "; Session(keep_messages=True) keeps messages for later ones"
        if run.request.options.execution_count is not None:
            how = "; %config NbParallel.keep_messages = True keeps messages for later cells"
        yield (
            f"{_so_many(dropped)} not received, and dropped at the end of the {what}: "
            f"{_listed(dropped, label)}{'' if what == 'script' else how}"
        )
    if len(kept) > len(absent):
        present = {m: n for m, n in kept.items() if m not in absent}
        yield f"{_so_many(present)} not received, and kept for later cells: {_listed(present, label)}"
    if absent:
        receivers = rank_list({m.destination for m in absent})
        stay = _so_many(absent, "", "stays", "stay")
        yield f"{stay} for {receivers}, not in this cell: {_listed(absent, label)}"


def _so_many(messages: Messages, of: str = "", one: str = "was", several: str = "were") -> str:
    """Return ``1 message was``, ``2 messages of earlier cells were``."""
    count = sum(messages.values())
    return f"1 message{of} {one}" if count == 1 else f"{count} messages{of} {several}"


def _listed(messages: Messages, label: str = "") -> str:
    """Return ``rank 0 to rank 1, rank 1 to rank 2 (line 3, tag 5); …``; `label`: the file of the lines."""
    listed = sorted(messages, key=lambda m: (_place(m), m.source, m.destination))
    parts = []
    for place, alike in groupby(listed[:MOST_LISTED], _place):
        pairs = [
            f"rank {m.source} to rank {m.destination}{f' {messages[m]} times' if messages[m] > 1 else ''}"
            for m in alike
        ]
        cell, line, tag, in_group = place
        of = f" of {cell or label}" if cell or label else ""
        where = f"line {line or '?'}{of}, tag {tag}"
        parts.append(f"{', '.join(pairs)} ({where}{', in a group' if in_group else ''})")
    more = len(listed) - MOST_LISTED
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def _place(m: SentMessage) -> tuple[str, int, int, bool]:
    return m.cell, m.line, m.tag, m.in_group
