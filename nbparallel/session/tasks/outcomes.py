"""From what ranks reported to a `CellResult`, or to the error that the cell raises."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

from nbparallel.errors import CellTimeoutError, ProtocolError, RankDiedError
from nbparallel.session.monitoring.timeline import CellRecord
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.rank_handle import RankExit, RankHandle
from nbparallel.session.results import CellResult, RankResult, RankValues, RemoteValue
from nbparallel.session.tasks import parallel_error
from nbparallel.session.tasks.task_run import TaskRun
from nbparallel.wire.control import ControlView, State
from nbparallel.wire.messages import Cause, CellTask, Outcome, RankFailure, Task


def result_of(
    run: TaskRun,
    output: TaskOutput,
    *,
    seconds: float,
    notes: tuple[str, ...],
    loads: Callable[[Any], Any],
    copied: Mapping[str, int],
    shared: Mapping[str, int],
) -> CellResult:
    """Return what there is, failed or not; values are rebuilt here, once."""
    ranks: dict[int, RankResult] = {}
    values: dict[int, Any] = {}
    for rank in sorted({*run.outcomes, *run.deaths}):
        outcome = run.outcomes.get(rank)
        value = None
        if outcome is not None and outcome.has_value:
            value = values[rank] = _value(outcome, loads)
        ranks[rank] = RankResult(
            rank=rank,
            value=value,
            text=outcome.text if outcome is not None else "",
            stdout=output.text(rank, "stdout"),
            stderr=output.text(rank, "stderr"),
            displays=output.displays(rank),
            seconds=outcome.wall_ns / 1e9 if outcome is not None else seconds,
            wait_seconds=outcome.wait_ns / 1e9 if outcome is not None else 0.0,
            error=None,
        )
    return CellResult(RankValues(values), ranks, seconds, notes, copied, shared)


def _value(outcome: Outcome, loads: Callable[[Any], Any]) -> Any:
    if outcome.value is None:
        return RemoteValue(outcome.text, outcome.value_error or "its value was not asked for")
    try:
        return loads(outcome.value)
    except Exception as error:  # noqa: BLE001  rebuilding runs code of the user's classes
        return RemoteValue(outcome.text, f"it cannot be rebuilt here: {type(error).__name__}: {error}")


def record_of(run: TaskRun, task: Task | None) -> CellRecord | None:
    """Return what ranks noted for the timeline; None if it was no code of the user's."""
    ranks = {rank: outcome.timeline for rank, outcome in run.outcomes.items() if outcome.timeline is not None}
    if not ranks:
        return None
    number: int = 0
    source: tuple[str, ...] = ()
    if isinstance(task, CellTask):
        number, source = task.execution_count, ("",) * task.line_offset + tuple(task.source.split("\n"))
    died = {rank: describe_death(death) for rank, death in run.deaths.items()}
    return CellRecord(number, source, ranks, died)


def raise_if_failed(
    run: TaskRun, result: CellResult, handles: Mapping[int, RankHandle], control: ControlView
) -> None:
    """Raise what the cell has to raise, with `result` attached.

    Raises
    ------
    KeyboardInterrupt
        The user interrupted; it carries ``.result``, and ``.failures``: where each rank was.
    CellTimeoutError
        The time-out ran out.
    ParallelError
        Ranks failed; one key for every rank that raised, the root cause first.
    """
    failed: dict[int, RankFailure] = {}
    freed: dict[int, str] = {}
    unfinished: dict[int, RankFailure] = {}
    for rank, outcome in run.outcomes.items():
        if outcome.ok:
            continue
        unfinished[rank] = outcome.failure
        if outcome.interrupted and (rank in run.freed or run.interrupted or run.timed_out):
            freed[rank] = parallel_error.lines_of([outcome.failure])
        elif isinstance(outcome.failure, RankFailure):
            failed[rank] = outcome.failure
    for rank, death in run.deaths.items():
        failed[rank] = unfinished[rank] = death_failure(handles[rank], death, control)
    unfinished = dict(sorted(unfinished.items()))
    if run.interrupted:
        interrupt = KeyboardInterrupt(f"the cell was interrupted{parallel_error.whereabouts(unfinished)}")
        interrupt.result = result  # type: ignore[attr-defined]
        interrupt.failures = unfinished  # type: ignore[attr-defined]
        raise interrupt
    if run.timed_out:
        raise CellTimeoutError(
            f"the cell ran longer than its time-out of {run.timeout:g} s and was interrupted"
            f"{parallel_error.whereabouts(unfinished)}",
            result=result,
            failures=unfinished,
        )
    if not failed and freed:  # cannot be: somebody must have failed for others to be freed
        failed = {rank: run.outcomes[rank].failure for rank in freed}
    if failed:
        raise parallel_error.build(failed, freed, result)


def death_failure(handle: RankHandle, death: RankExit, control: ControlView) -> RankFailure:
    """Return the failure of a rank whose process ended."""
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
    tail, crash_line = last_words(handle.stderr_tail)
    if crash_line is not None:
        line, phase = crash_line, f" in user code on line {crash_line}"
    place = f",{phase}," if phase else ""
    message = f"rank {handle.rank} (process {death.pid}){place} {describe_death(death)}"
    if tail:
        message += f"; its last words on stderr:\n{tail}"
    error: Exception = RankDiedError(
        message,
        rank=handle.rank,
        pid=death.pid,
        exit_code=death.exit_code,
        signal_name=death.signal_name,
        line=line,
        stderr=tail,
    )
    if handle.nonsense:
        error = ProtocolError(message)
    return RankFailure(
        rank=handle.rank,
        time_ns=int(death.seen * 1e9),
        ename=type(error).__name__,
        evalue=message,
        exception=pickle.dumps(error),
        traceback=(),
        frames=(),
        cause=Cause.DIED,
    )


_CELL_FRAME = re.compile(r'File "<In\[\d+\] #\d+>", line (\d+)')


def last_words(stderr: str) -> tuple[str, int | None]:
    """Return what is worth showing of a dead rank's stderr, and the cell's line if faulthandler names it.

    Of faulthandler's report that is the user's part of the stack: what called the cell is ours.
    """
    lines = stderr.strip().splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if begin is None:
        return "\n".join(lines[-10:]), None
    shown, cell_line = lines[max(0, begin - 5) : begin], None
    for line in lines[begin:]:
        found = _CELL_FRAME.search(line)
        if found:
            cell_line = cell_line or int(found[1])
            line = line.replace(line[line.index('"') : line.rindex('"') + 1], "of the cell")
        shown.append(line)
        if found:
            break
    return "\n".join(shown[:20]), cell_line


_LIKELY = {
    "SIGKILL": "killed by SIGKILL: by hand, or by the system because memory ran out",
    "SIGSEGV": "crashed (SIGSEGV): C code touched memory that is not its own, or wrote to an array that "
    "ranks may only read (torch does after from_numpy: `--share` the array, or copy it)",
    "SIGBUS": "crashed (SIGBUS): the memory behind a mapping is gone (was a mapped file made shorter?)",
    "SIGABRT": "aborted (SIGABRT): C code gave up",
    "SIGFPE": "crashed (SIGFPE): C code divided by zero",
    "SIGTERM": "was ended by SIGTERM",
}


def describe_death(death: RankExit) -> str:
    """Return a sentence's end: ``was killed by SIGKILL …``."""
    name = death.signal_name
    if death.reason:
        return f"was {death.reason}"
    if name is not None:
        return "was " + _LIKELY[name] if name == "SIGKILL" else _LIKELY.get(name, f"was ended by {name}")
    if death.exit_code is None:
        return "ended; how is not known"
    return f"ended itself with exit code {death.exit_code} (os._exit, or C code that calls exit)"
