"""Running one task on a rank: a cell, a function, a variable to give or take."""

from __future__ import annotations

import heapq
import os
import sys
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from nbparallel import sharing
from nbparallel.engine import environment, failures, namespace
from nbparallel.errors import InternalError, UnpicklableError
from nbparallel.sharing.strategies import registry
from nbparallel.transfer import pickling
from nbparallel.wire.messages import (
    CallTask,
    CellTask,
    NamesTask,
    Outcome,
    PullTask,
    PushTask,
    RankMemory,
    RankSegment,
    ScriptTask,
    Task,
    runs_user_code,
)
from nbparallel.wire.timeline import RankTimeline

if TYPE_CHECKING:
    from nbparallel.engine.engine import Engine


def run_script(task: ScriptTask, namespace: dict[str, Any]) -> None:
    """Run the script in the rank's ``__main__``; leaving by ``sys.exit(0)`` is success.

    The names that are predefined in a cell are there as well, until the script assigns its own.
    """
    sys.argv[:] = [task.path, *task.arguments]
    namespace["__file__"] = task.path
    namespace["__package__"] = task.package
    code = compile(task.source, task.path, "exec", dont_inherit=True)
    try:
        exec(code, namespace)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


_NOTHING = object()
MOST_SEGMENTS = 50
"""Told one by one with every task; a rank that makes more of them tells the largest, and the sum of all."""


def run(engine: Engine, task: Task) -> tuple[Outcome, Any]:
    """Run a task to its end, whatever happens; return what to report and what to keep alive for it."""
    started = time.monotonic_ns()
    value: Any = _NOTHING
    failure: BaseException | None = None
    notes: tuple[str, ...] = ()
    communicator = engine.communicator
    engine.shell.value_text = ""
    waited = communicator.wait_ns if communicator is not None else 0
    try:
        try:
            if communicator is not None:
                go_on = isinstance(task, CellTask) and task.go_on
                communicator.begin_cell(task.number, task.ranks, _filename(engine, task), go_on=go_on)
            engine.interrupts.arm(task.number)
            _follow_choice(engine)
            notes = _follow_place(engine) + namespace.apply(
                task.updates, engine.shell.user_ns, sharing.current_store(), defaults=engine.defaults.values
            )
            engine.applied = task.number
            engine.defaults.restore()
            if task.seed is not None:
                engine.defaults.set(rng=environment.random_streams(task.seed, engine.rank))
            value, failure = _perform(engine, task)
            if failure is None and communicator is not None and os.getpid() == engine.pid:
                communicator.finish_cell()
        finally:
            engine.interrupts.disarm()
            engine.breakpoints.end_task()
    except BaseException as error:  # noqa: BLE001  a rank survives everything and reports it
        failure = error
    if os.getpid() != engine.pid:
        return _outcome(engine, task, failure, value, started, notes), None
    if failure is not None:
        failure = failures.improve(failure, engine.shell)
    wait_ns = 0
    if communicator is not None:
        communicator.end_cell(failure, could_receive=runs_user_code(task))
        for forgotten in communicator.forgotten if failure is None else ():
            sys.stderr.write(f"nbparallel: {forgotten}; keep what it returns and call wait()\n")
        for unreceived in communicator.unreceived if failure is None else ():
            sys.stderr.write(f"nbparallel: {unreceived}\n")
        wait_ns = communicator.wait_ns - waited
    return _with_value(engine, task, failure, value, started, notes, wait_ns)


def _follow_choice(engine: Engine) -> None:
    """Use the sharing strategy that the notebook has chosen since the last task."""
    if engine.choice:
        store = sharing.current_store()
        registry.follow(pickling.loads(engine.choice, store, broker=engine.broker, home=engine.shell.user_ns))
        engine.choice = b""


def _follow_place(engine: Engine) -> tuple[str, ...]:
    """Go where the notebook has gone since the last task; return what the user should know of it."""
    before, engine.place = engine.place, engine.next_place
    return environment.follow_context(before, engine.place)


def _filename(engine: Engine, task: Task) -> str:
    """Return the file name under which the cell's code will be compiled."""
    if isinstance(task, CellTask):
        engine.shell.execution_count = task.execution_count
        engine.shell.source = cell_text(task)
        filename: str = engine.shell.compile.begin(f"<In[{task.execution_count}] #{task.number}>")
        return filename
    return task.path if isinstance(task, ScriptTask) else ""


def cell_text(task: CellTask) -> str:
    """Return the cell with as many lines above it as in the notebook, so that line numbers agree."""
    if task.source.lstrip().startswith("%%"):
        return task.source  # a cell magic has to stand in the first line
    return "# %%parallel\n" * task.line_offset + task.source


def _perform(engine: Engine, task: Task) -> tuple[Any, BaseException | None]:
    if isinstance(task, CellTask):
        return _run_cell(engine, task)
    store = sharing.current_store()
    if isinstance(task, CallTask):
        function, args = pickling.loads(task.call, store, broker=engine.broker, home=engine.shell.user_ns)
        return function(*args), None
    if isinstance(task, ScriptTask):
        run_script(task, engine.shell.user_ns)
        return _NOTHING, None
    if isinstance(task, PullTask):
        if task.name not in engine.shell.user_ns:
            raise NameError(f"name {task.name!r} is not defined on rank {engine.rank}")
        return engine.shell.user_ns[task.name], None
    if isinstance(task, PushTask):
        values = pickling.loads(task.values, store, broker=engine.broker, home=engine.shell.user_ns)
        engine.shell.user_ns.update(values)
        return _NOTHING, None
    if isinstance(task, NamesTask):
        names = namespace.names_of(engine.shell.user_ns)
        return [name for name in engine.defaults.user_names() if names.is_only_here(name)], None
    raise InternalError(f"unknown task {type(task).__name__}")


def _run_cell(engine: Engine, task: CellTask) -> tuple[Any, BaseException | None]:
    shell = engine.shell
    shell.show_value, shell.needs_text = task.show_value, task.show_value or task.want_value
    if engine.communicator is not None:
        shell.at_line = engine.communicator.at_line
    result = shell.run_cell(shell.source, store_history=False, silent=False)
    value, error = result.result, result.error_before_exec or result.error_in_exec
    # IPython keeps the result until the next cell, and an error's frames refer to it: arrays that are a value
    # or in those frames would live as long.
    result.result = result.error_before_exec = result.error_in_exec = None
    return value, error


def _with_value(
    engine: Engine,
    task: Task,
    failure: BaseException | None,
    value: Any,
    started: int,
    notes: tuple[str, ...],
    wait_ns: int,
) -> tuple[Outcome, Any]:
    pickled, problem = None, ""
    has_value = failure is None and value is not _NOTHING
    if has_value and task.want_value:
        try:
            pickled = pickling.dumps(
                _snapshot(value), sharing.current_store(), broker=engine.broker, home=engine.shell.user_ns
            )
        except UnpicklableError as error:
            problem = str(error)
    return _outcome(
        engine,
        task,
        failure,
        value,
        started,
        notes,
        pickled=None if pickled is None else pickled.data,
        problem=problem,
        wait_ns=wait_ns,
    ), pickled


def _memory() -> RankMemory:
    """Return what shared memory this rank has made."""
    own = [segment for segment in sharing.current_store().segments(fetched=False) if segment.own]
    if not own:
        return RankMemory()
    used = [segment for segment in own if segment.phase != "pooled"]
    nbytes = sum(segment.nbytes for segment in used)
    largest = heapq.nlargest(MOST_SEGMENTS, used, attrgetter("nbytes"))
    return RankMemory(
        tuple(RankSegment(s.segment, s.nbytes, s.strategy, s.phase, s.writable) for s in largest),
        len(used),
        nbytes,
        sum(segment.nbytes for segment in own) - nbytes,
    )


def _snapshot(value: Any) -> Any:
    """Copy an array that lies in shared memory: the value is that of the cell's end, not a window."""
    if isinstance(value, np.ndarray) and sharing.is_shared(value):
        return value.copy()
    return value


def _timeline(engine: Engine, task: Task) -> RankTimeline | None:
    """Return the notes on the user's code that a task has run."""
    if engine.communicator is None or not runs_user_code(task):
        return None
    return engine.communicator.timeline()


def _outcome(
    engine: Engine,
    task: Task,
    failure: BaseException | None,
    value: Any,
    started: int,
    notes: tuple[str, ...],
    *,
    pickled: Any = None,
    problem: str = "",
    wait_ns: int = 0,
) -> Outcome:
    return Outcome(
        number=task.number,
        rank=engine.rank,
        ok=failure is None,
        has_value=failure is None and value is not _NOTHING,
        value=pickled,
        value_error=problem,
        text=engine.shell.value_text,
        failure=failures.describe(failure, engine) if failure is not None else None,
        interrupted=isinstance(failure, KeyboardInterrupt),
        wall_ns=time.monotonic_ns() - started,
        wait_ns=wait_ns,
        notes=notes,
        applied=engine.applied == task.number,
        memory=_memory(),
        void=engine.communicator is not None and engine.communicator.failed,
        timeline=_timeline(engine, task),
    )
