"""Running one task on a rank: a cell, a call, a script, or the transfer of variables."""

from __future__ import annotations

import functools
import heapq
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from nbparallel import sharing
from nbparallel.distributed.arguments import part_of
from nbparallel.distributed.runtime.call_site import is_ours
from nbparallel.distributed.runtime.observers import Observation, ObservedCell, cell_observer
from nbparallel.engine import environment, failures
from nbparallel.engine.rank_state import RankState
from nbparallel.errors import UnpicklableError
from nbparallel.errors.questions import ask, class_name, text_of
from nbparallel.sharing.strategies import registry
from nbparallel.transfer import pickling
from nbparallel.transfer.cell_sources import label_of
from nbparallel.transfer.pickled_items import dump_item, load_item
from nbparallel.transfer.variable_info import show_value
from nbparallel.wire.control_layout import ITEMS, KEEP_FRAMES, TICKET
from nbparallel.wire.inspection import DrawnNames, ShownValue
from nbparallel.wire.messages import (
    CELL_FILE,
    CallTask,
    Cause,
    CellTask,
    DebugTask,
    DrawTask,
    NamesTask,
    Outcome,
    PullTask,
    PushTask,
    RankMemory,
    RankSegment,
    RankTimeline,
    ScriptTask,
    Task,
    runs_user_code,
)
from nbparallel.wire.name_updates import UsageHints

# The report of one task on a rank: what it returned or raised, how long it took, what memory it made.

_NOTHING = object()
MOST_SEGMENTS = 50
"""Segments reported singly with every task; of more, the largest are, and the sum of all."""


class TaskReport:
    """Collects how a task went, from its start to the `Outcome` that the kernel gets.

    Attributes
    ----------
    value : object
        What it returned.
    failure : BaseException or None
        What ended the task.
    notes : tuple of str
        Lines for the user.
    keepalive : object
        Owns memory that the value refers to by handles inside of bytes.
    observed : dict
        The logs of the cell's observers.
    """

    def __init__(self, state: RankState, task: Task) -> None:
        self._state, self._task = state, task
        self._started, self._cpu = time.monotonic_ns(), time.process_time_ns()
        self._waited = self._wait_ns()
        self.value: Any = _NOTHING
        self.failure: BaseException | None = None
        self.notes: tuple[str, ...] = ()
        self.keepalive: object = None
        self.observed: dict[str, Any] = {}
        self.drawn_before: tuple[tuple[ShownValue | None, ...], int] = (), 0
        """What the names that are to be drawn held before the user's code ran, and when."""

    def _drawn(self) -> DrawnNames | None:
        if not (names := _names(self._task)):
            return None
        before, before_ns = self.drawn_before
        after_ns = time.monotonic_ns()  # before the look: the last rank to begin it finds what each one wrote
        after = _shown(self._state, names)
        if before:  # then these say where numbers come from
            after = tuple(value and replace(value, numbers=()) for value in after)
        return DrawnNames(before, after, before_ns, after_ns)

    def _wait_ns(self) -> int:
        communicator = self._state.communicator
        return 0 if communicator is None else communicator.spent()[0]

    def outcome(self) -> tuple[Outcome, object]:
        """Return the message for the kernel, and what must stay alive until the kernel has loaded it."""
        state, task, failure = self._state, self._task, self.failure
        wait_ns = self._wait_ns() - self._waited
        maps = isinstance(task, CallTask) and task.items >= 0  # what was done is there, whatever ended it
        has_value = (failure is None or maps) and self.value is not _NOTHING
        pickled, problem, text = None, "", state.shell.value_text
        if has_value and task.want_values:
            try:
                pickled = pickling.dumps(
                    snapshot(self.value),
                    sharing.current_store(),
                    broker=state.broker,
                    main_globals=state.variables,
                )
            except BaseException as error:  # noqa: BLE001  the value's own code may raise anything
                whose = "" if isinstance(error, UnpicklableError) else f"{class_name(error)}: "
                problem, text = whose + text_of(error), text or ask(lambda: repr(self.value), str)
        described = None if failure is None else failures.describe(failure, state)
        keeps = runs_user_code(task) and state.control is not None and state.control.words[KEEP_FRAMES]
        if failure is not None and described is not None and keeps:
            state.frames.keep(failure, described.time_ns)
        return Outcome(
            number=task.number,
            rank=state.rank,
            ok=failure is None,
            has_value=has_value,
            value=None if pickled is None else pickled.data,
            value_error=problem,
            text=text,
            failure=described,
            interrupted=described is not None
            and described.cause is Cause.INTERRUPT
            and issubclass(type(failure), KeyboardInterrupt),
            wall_ns=time.monotonic_ns() - self._started,
            wait_ns=wait_ns,
            cpu_ns=time.process_time_ns() - self._cpu,
            notes=self.notes,
            applied=state.applied == task.number,
            memory=_memory(state.frames.nbytes),
            invalidates_epoch=state.communicator is not None and state.communicator.failed,
            timeline=self._timeline(),
            messages=None if state.communicator is None else state.communicator.messages,
            drawn=self._drawn(),
            observed=self.observed,
        ), (pickled, self.keepalive)

    def _timeline(self) -> RankTimeline | None:
        """Return when statements and operations of the user's code began and ended."""
        if self._state.communicator is None or not runs_user_code(self._task):
            return None
        return self._state.communicator.timeline()


def _names(task: Task) -> tuple[str, ...]:
    return task.draw if isinstance(task, CellTask | DrawTask) else ()


def _shown(state: RankState, names: tuple[str, ...]) -> tuple[ShownValue | None, ...]:
    """Return the beginnings of what names hold, None for one that is not defined."""
    store, variables, world = sharing.current_store(), state.variables, state.communicator
    size = state.configure.place.world_size if world is None else world.world_size
    return tuple(
        show_value(variables[name], store, lambda n: [part_of(n, rank, size) for rank in range(size)])
        if name in variables
        else None
        for name in names
    )


def snapshot(value: Any) -> Any:
    """Copy a shared array or a file's: the value is that of the cell's end, not a view of it."""
    if isinstance(value, np.ndarray) and (isinstance(value, np.memmap) or sharing.is_shared(value)):
        return value.copy()
    return value


_DEBUGS = re.compile(r"%debug|\bpm\(|post_mortem|last_(?:exc|value|traceback)")
"""What of a cell uses the frames of the failure before it."""


def _memory(frames_nbytes: int) -> RankMemory:
    """Return what shared memory this rank has made."""
    own = [segment for segment in sharing.current_store().segments(fetched=False) if segment.own]
    used = [segment for segment in own if segment.phase != "pooled"]
    nbytes = sum(segment.nbytes for segment in used)
    largest = heapq.nlargest(MOST_SEGMENTS, used, attrgetter("nbytes"))
    return RankMemory(
        tuple(RankSegment(s.segment, s.nbytes, s.strategy, s.phase, s.writable) for s in largest),
        len(used),
        nbytes,
        sum(segment.nbytes for segment in own) - nbytes,
        frames_nbytes,
    )


def run_script(task: ScriptTask, variables: dict[str, Any]) -> None:
    """Run the script in the rank's ``__main__``; leaving by ``sys.exit(0)`` is success.

    The names that are predefined in a cell are there as well, until the script assigns its own.
    """
    sys.argv[:] = [task.path, *task.arguments]
    variables["__file__"] = task.path
    variables["__package__"] = task.package
    try:
        exec(compile(task.source, task.path, "exec", dont_inherit=True), variables)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def run_task(state: RankState, task: Task, fds: Sequence[int] = ()) -> tuple[Outcome, object]:
    """Run a task to its end, whatever happens; return its outcome and what must stay alive with it.

    `fds` came with it and stay the caller's.

    1. The streams are ours again, the communicator opens the cell, and interrupts are armed.
    2. The rank follows the notebook: sharing strategy, directory, names, seed.
    3. The task's code runs.  If it succeeds, the communicator finishes what the cell began.
    4. Interrupts are disarmed, and the streams put back: nothing below is the user's code, but an object's
       own pickling.
    5. The communicator closes the cell, so that peers see a failure, and the outcome is made.

    A child that the code forked and that comes back here exits: it is no rank.
    """
    if state.frames.failed_ns and runs_user_code(task) and not _DEBUGS.search(getattr(task, "source", "")):
        state.frames.forget()
    report = TaskReport(state, task)
    # what is typed into a debugger is no cell: operations refuse to begin
    communicator = None if isinstance(task, DebugTask) else state.communicator
    uses: UsageHints | None = task.uses if isinstance(task, CellTask) else None
    hidden: dict[str, Any] | None = None
    own: frozenset[str] = frozenset()
    state.shell.value_text = ""
    state.output.put_back()
    try:
        try:
            if communicator is not None:
                communicator.begin_cell(
                    task.number,
                    task.ranks,
                    _filename(state, task),
                    go_on=isinstance(task, CellTask) and task.go_on,
                    fds=fds,
                )
            state.interrupts.arm(task.number)
            report.notes = _follow_notebook(state, task)
            if uses is not None:
                hidden, own = state.defaults.hidden(uses.predefined), state.names.own(uses.augmented)
                report.notes += state.defaults.describe_hidden(uses.predefined, state.names.is_own)
                report.notes += state.names.describe_kept(
                    name for name in uses.kept if name not in uses.predefined
                )
            _perform(state, task, fds, report)
            if report.failure is None and communicator is not None and not state.is_forked_child():
                communicator.finish_cell()
        finally:
            state.interrupts.disarm()
            state.interrupts.end(task.number)
            state.output.put_back()
            state.breakpoints.end_task()
    except BaseException as error:  # noqa: BLE001  a rank survives everything and reports it
        report.failure = error
    if state.is_forked_child():  # it is no rank, and shares the rank's sockets
        state.output.flush()
        os._exit(0 if report.failure is None else 1)
    if report.failure is not None:
        failure = report.failure
        follows = not isinstance(task, CellTask) or task.follows_names
        report.failure = ask(  # its own code runs
            lambda: failures.improve(failure, state, follows_names=follows), lambda: failure
        )
    if uses is not None and hidden is not None:
        report.notes += state.defaults.describe_hidden(uses.predefined, state.names.is_own, hidden)
        report.notes += state.names.describe_changed(uses, own)
    if communicator is not None:
        communicator.end_cell(report.failure, could_receive=runs_user_code(task))
        if report.failure is None:
            for forgotten in communicator.forgotten:
                sys.stderr.write(f"nbparallel: {forgotten}; keep what it returns and call wait()\n")
            for sentence in communicator.unreleased:
                sys.stderr.write(f"nbparallel: {sentence}\n")
    return report.outcome()


def _follow_notebook(state: RankState, task: Task) -> tuple[str, ...]:
    """Use the notebook's sharing strategy, directory, names and seed; return lines for the user."""
    if state.strategy_choice:
        registry.follow(_load(state, state.strategy_choice))
        state.strategy_choice = b""
    before, state.context = state.context, state.next_context
    notes = environment.follow_context(before, state.context)
    notes += state.names.apply(task.updates)
    state.settings.follow(state.context.settings)
    state.applied = task.number
    state.defaults.restore()
    if task.seed is not None:
        state.defaults.set(rng=environment.random_streams(task.seed, state.rank))
    return notes


def _load(state: RankState, data: bytes) -> Any:
    return pickling.loads(data, sharing.current_store(), broker=state.broker, main_globals=state.variables)


def _filename(state: RankState, task: Task) -> str:
    """Return the file name under which the cell's code will be compiled."""
    if isinstance(task, CellTask):
        state.shell.execution_count = task.execution_count
        # as many lines above it as in the notebook, so that numbers agree; a cell magic stands in the first
        state.shell.source = "# %%parallel\n" * _lines_above(task) + task.source
        filename: str = state.shell.compile.begin(
            f"{CELL_FILE}{task.execution_count}-{task.number}>", _lines_above(task)
        )
        return filename
    return task.path if isinstance(task, ScriptTask) else ""


def _lines_above(task: CellTask) -> int:
    return 0 if task.source.lstrip().startswith("%%") else task.line_offset


def _perform(state: RankState, task: Task, fds: Sequence[int], report: TaskReport) -> None:
    variables = state.variables
    if isinstance(task, CellTask):
        _run_cell(state, task, report)
    elif isinstance(task, CallTask) and task.items >= 0:
        with _observed(state, task, report):
            _map_items(state, task, fds[0], report)
    elif isinstance(task, CallTask):
        function, args = _load(state, task.call)
        _name_source(state, function, args)
        report.value = function(*args)
    elif isinstance(task, ScriptTask):
        run_script(task, variables)
    elif isinstance(task, PullTask):
        if task.name not in variables:
            raise NameError(f"name {task.name!r} is not defined on rank {state.rank}")
        report.value = variables[task.name]
    elif isinstance(task, PushTask):
        variables.update(_load(state, task.values))
    elif isinstance(task, NamesTask):
        report.value = [name for name in state.defaults.user_names() if state.names.is_only_here(name)]
    elif isinstance(task, DebugTask):
        state.frames.open(task.failed_ns)
    # a `DrawTask` is answered by its report


def _name_source(state: RankState, function: object, args: Sequence[object] = ()) -> None:
    """Have lines of operations be those of the function that is called."""
    code = _code_of(function, args)
    if code is not None and state.communicator is not None:
        label = label_of(code.co_filename) or os.path.basename(code.co_filename)
        state.communicator.at_source(code.co_filename, label)


def _code_of(function: object, args: Sequence[object]) -> CodeType | None:
    """Return the code of the user's function that a call runs; None if it is none of Python."""
    for called in (function, *args[:1]):  # `spawn` passes its function to one of ours
        inner = called.func if isinstance(called, functools.partial) else called
        inner = getattr(inner, "__func__", inner) if isinstance(inner, MethodType) else inner
        while isinstance(inner, FunctionType) and "__wrapped__" in inner.__dict__:
            inner = inner.__dict__["__wrapped__"]
        if isinstance(inner, FunctionType) and not is_ours(inner.__code__.co_filename):
            return inner.__code__
    return None


def _sendable(error: Exception, state: RankState) -> Exception:
    """Return an error without its frames; of one that cannot travel, what it says."""
    if failures.pickled(error, state) is None:
        return RuntimeError(f"{class_name(error)}: {text_of(error)}")
    return error.with_traceback(None)


MOST_TICKETS = 1 << 16
"""Bytes that a rank which fails takes out of the pipe at a time, so that no other begins another item."""


def _map_items(state: RankState, task: CallTask, tickets: int, report: TaskReport) -> None:
    """Call the function for the items of one ticket after the other; succeed with tickets and results.

    A result is pickled when it is there: the function may return the same array each time, and one that
    cannot travel is an error of its item, not of the end.  Results are sent now and then, and
    the rest is the value also of a failure: what was done is not lost.
    """
    assert state.control is not None, "a rank joins an epoch before its first task"
    store, words = sharing.current_store(), state.control.words
    word = state.control.layout.rank_word(state.rank, ITEMS)
    words[word], words[word + 1], words[word + 2], words[word + 3], words[word + 4] = 0, 0, 0, 0, 0
    words[word] = task.number  # last: what the kernel reads with it is this task's
    function, items = _load(state, task.call)
    _name_source(state, function)
    results: dict[int, Any] = {}
    held: list[Any] = []
    report.value, report.keepalive = results, held
    sent = time.monotonic()

    def call(value: Any) -> Any:
        if task.item_seconds is None:
            return function(value)
        words[word + 3] = time.monotonic_ns()
        try:
            return state.interrupts.call_within(task.item_seconds, function, value)
        finally:
            words[word + 3] = 0

    def keep(number: int, first: int, length: int, done: list[Any]) -> None:
        results[number], arrays = dump_item(
            done[0] if length == 1 else done,
            f"the result of item {first}",
            store,
            state.broker,
            main_globals=state.variables,
            copy=True,
        )
        held.append(arrays)

    def send() -> None:
        if results and not state.is_forked_child():
            pickled = pickling.dumps(results, store, broker=state.broker, main_globals=state.variables)
            held.append(pickled)
            state.output.send_observed("", pickled.data)
            results.clear()

    if state.communicator is not None:
        state.communicator.begin_items()
    try:
        while not state.is_forked_child() and (ticket := os.read(tickets, TICKET.size)):
            number, length, first = TICKET.unpack(ticket)
            indices = range(first, first + length)
            words[word + 1] = first + 1
            if isinstance(items, list):
                loaded = load_item(items[number], store, broker=state.broker, name=f"item {first}")
                values = [loaded] if length == 1 else loaded
            else:
                values = [items[index] for index in indices]
            done: list[Any] = []
            try:
                for index, value in zip(indices, values, strict=True):
                    words[word + 1] = index + 1
                    try:
                        result = call(value)
                    except Exception as error:
                        if not task.return_errors:
                            raise
                        result = _sendable(error, state)
                    if state.is_forked_child():
                        return  # what it took would be missing
                    done.append(snapshot(result))
                    words[word + 2] += 1
            finally:
                if done and not state.is_forked_child():
                    keep(number, first, length, done)
            if time.monotonic() >= sent + task.send_seconds:
                send()
                sent = time.monotonic()
        send()
    except BaseException:
        while not state.is_forked_child() and os.read(tickets, MOST_TICKETS):
            pass
        raise


@contextmanager
def _observed(
    state: RankState, task: CellTask | CallTask, report: TaskReport
) -> Iterator[Iterable[Observation]]:
    """Have the cell's observers look on while the block runs."""
    found: dict[str, Observation] = {}
    try:
        with ExitStack() as stack:
            communicator = state.communicator
            for name in task.observers if communicator is not None else ():
                assert communicator is not None
                cell = ObservedCell(
                    communicator,
                    state.variables,
                    state.names.is_delivered_array,
                    filename=state.shell.compile.filename if isinstance(task, CellTask) else "",
                    transformers=state.shell.ast_transformers,
                    send=functools.partial(state.output.send_observed, name),
                )
                found[name] = stack.enter_context(cell_observer(name).observe(cell))
            yield found.values()
    finally:
        report.observed = {name: observation.log() for name, observation in found.items()}


def _run_cell(state: RankState, task: CellTask, report: TaskReport) -> None:
    shell = state.shell
    shell.show_values, shell.needs_text = task.show_values, task.show_values or task.want_values
    if task.draw:
        report.drawn_before = _shown(state, task.draw), time.monotonic_ns()
    with _observed(state, task, report) as observations:
        if state.communicator is not None:
            shell.at_line = state.communicator.at_line
        result = shell.run_cell(shell.source, store_history=False, silent=False)
        for observation in observations:
            result.result = observation.value(result.result)
    error = result.error_in_exec if result.error_before_exec is None else result.error_before_exec
    if error is None:
        report.value = result.result
    report.failure = error
    # IPython keeps the result until the next cell, and an error's frames refer to it: arrays that are a value
    # or in those frames would live as long.
    result.result = result.error_before_exec = result.error_in_exec = None
