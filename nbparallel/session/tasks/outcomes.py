"""Outcomes of a task: the `CellResult` that they make, or the error that the cell raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nbparallel.errors import (
    RANKS_INTERRUPTED,
    CellTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    FileDescriptorLimitError,
    ProtocolError,
    RankDiedError,
    SegmentLostError,
    SharedMemoryFullError,
    rank_list,
)
from nbparallel.session.processes.rank_death import RankDeath, describe_death, stderr_excerpt
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.session.results import (
    CellRecord,
    CellResult,
    DrawnValues,
    RankResult,
    RankValues,
    RemoteValue,
)
from nbparallel.session.tasks import parallel_error
from nbparallel.session.tasks.cell_times import times_now
from nbparallel.session.tasks.task_run import TaskRun
from nbparallel.transfer.pickling import dump_error
from nbparallel.wire.control import ControlView, State
from nbparallel.wire.messages import Cause, CellTask, DrawTask, Outcome, RankFailure
from nbparallel.wire.system import PAUSE_SECONDS

if TYPE_CHECKING:
    pass

__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here
DEATH_SECONDS = 0.5
"""How long to wait for the report that a rank has ended, once memory of it was missed."""
NOT_ASKED = "its value was not asked for"
"""Why a value stayed on its rank although it could have travelled."""


def values_of(run: TaskRun, loads: Callable[[Any], Any]) -> dict[int, Any]:
    """Return the values of a task by rank; `loads` rebuilds each, once."""
    return {
        rank: _value(run.handles.get(rank), end, loads)
        for rank, end in sorted(run.outcomes.items())
        if end.has_value
    }


def missing_values_notes(values: Mapping[int, Any]) -> list[str]:
    """Return a line for each reason for which values that were asked for stayed on their ranks."""
    by_reason: dict[str, list[int]] = {}
    for rank, value in values.items():
        if isinstance(value, RemoteValue) and value.reason != NOT_ASKED:
            by_reason.setdefault(value.reason, []).append(rank)
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
    notes = tuple(run.request.notes)
    return CellResult(RankValues(values), ranks, seconds, notes, copied, shared, _drawn(run), run.findings())


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


def _value(handle: RankHandle | None, outcome: Outcome, loads: Callable[[Any], Any]) -> Any:
    if outcome.value is None:
        return RemoteValue(outcome.rank, outcome.text, outcome.value_error or NOT_ASKED)
    try:
        return loads(outcome.value)
    except Exception as error:  # noqa: BLE001  rebuilding runs code of the user's classes
        reason = f"it cannot be rebuilt in the notebook: {type(error).__name__}: {error}"
        missed = handle if isinstance(error, SegmentLostError) else None
        if missed is not None and (death := _death_of(missed)) is not None:
            reason = (
                f"rank {outcome.rank} {describe_death(death)}, after it had answered, and its arrays with it"
            )
        lack = error if isinstance(error, FileDescriptorLimitError | SharedMemoryFullError) else None
        if lack is not None:
            lack.__traceback__ = lack.__cause__ = lack.__context__ = None
        return RemoteValue(outcome.rank, outcome.text, reason, lack)


def _death_of(handle: RankHandle) -> RankDeath | None:
    """Return how a rank ended whose memory is gone; the supervisor's word on it may be on its way."""
    deadline = time.monotonic() + DEATH_SECONDS
    while handle.death is None and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
    return handle.death


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


class Ending(NamedTuple):
    """How a task ended on all its ranks."""

    phase: str
    """``finished``, ``failed`` or ``interrupted``."""
    rank: int = -1
    """The rank that failed first; -1: none."""
    line: int = 0
    """The line of the cell on which it did; 0 unknown."""
    between: str = ""
    """What went wrong between ranks, in a line; empty if it failed on that rank alone."""


SUCCESS = Ending("finished")


def ending_of(error: BaseException) -> Ending:
    """Return how a task ended that raised `error` in the notebook."""
    if isinstance(error, KeyboardInterrupt | CellTimeoutError):
        return Ending("interrupted")
    failures = getattr(error, "failures", None)
    if not failures:
        return Ending("failed")
    rank, failure = next(iter(failures.items()))  # the root cause comes first
    between = failure.evalue.partition("\n")[0].rstrip(":") if failure.ename in _BETWEEN_RANKS else ""
    return Ending("failed", rank, failure.line or 0, between)


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
        failure = death_failure(run.handles[rank], end, run.control, _item(run, rank))
        failed[rank] = unfinished[rank] = failure
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
    if not failed and freed:  # cannot be: ranks are interrupted only after another one has failed
        failed = {rank: run.outcomes[rank].failure for rank in freed}
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
    line = None
    phase = ""
    if handle.rank < control.world_size:
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
    error: Exception = RankDiedError(
        message,
        rank=handle.rank,
        pid=end.pid,
        exit_code=end.exit_code,
        signal_name=end.signal_name,
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
