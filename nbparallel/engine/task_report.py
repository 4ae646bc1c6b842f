"""The report of one task on a rank: what it returned or raised, how long it took, what memory it made."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from nbparallel import sharing
from nbparallel.distributed.arguments import part_of
from nbparallel.engine import failures
from nbparallel.engine.rank_state import RankState
from nbparallel.errors import UnpicklableError
from nbparallel.errors.questions import class_name, text_of
from nbparallel.transfer import pickling
from nbparallel.transfer.shown_values import show_value
from nbparallel.wire.inspection import DrawnNames, ShownValue
from nbparallel.wire.messages import (
    Cause,
    CellTask,
    DrawTask,
    Outcome,
    RankMemory,
    RankSegment,
    Task,
    runs_user_code,
)
from nbparallel.wire.timeline import RankTimeline

_NOTHING = object()
MOST_SEGMENTS = 50
"""Segments reported singly with every task; of more, the largest are, and the sum of all."""


class TaskReport:
    """Collects how a task went, from its start to the `Outcome` that the kernel gets.

    Attributes
    ----------
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
        self._value: Any = _NOTHING
        self.failure: BaseException | None = None
        self.notes: tuple[str, ...] = ()
        self.keepalive: object = None
        self.observed: dict[str, Any] = {}
        self._before: tuple[tuple[ShownValue | None, ...], int] = (), 0

    def draw_before(self) -> None:
        """Record what the names that are to be drawn hold now, before the user's code runs."""
        self._before = _shown(self._state, _names(self._task)), time.monotonic_ns()

    def _drawn(self) -> DrawnNames | None:
        if not (names := _names(self._task)):
            return None
        before, before_ns = self._before
        after_ns = time.monotonic_ns()  # before the look: the last rank to begin it finds what each one wrote
        after = _shown(self._state, names)
        if before:  # then these say where numbers come from
            after = tuple(value and replace(value, numbers=()) for value in after)
        return DrawnNames(before, after, before_ns, after_ns)

    def succeed(self, value: Any) -> None:
        """Record the task's value."""
        self._value = value

    def fail(self, error: BaseException) -> None:
        """Record what ended the task; a later failure replaces an earlier one."""
        self.failure = error

    @property
    def ok(self) -> bool:
        """Whether nothing has failed so far."""
        return self.failure is None

    def _wait_ns(self) -> int:
        communicator = self._state.communicator
        return 0 if communicator is None else communicator.wait_ns

    def outcome(self) -> tuple[Outcome, object]:
        """Return the message for the kernel, and what must stay alive until the kernel has loaded it."""
        state, task, failure = self._state, self._task, self.failure
        wait_ns = self._wait_ns() - self._waited
        has_value = failure is None and self._value is not _NOTHING
        pickled, problem, text = None, "", state.shell.value_text
        if has_value and task.want_values:
            try:
                pickled = pickling.dumps(
                    snapshot(self._value),
                    sharing.current_store(),
                    broker=state.broker,
                    main_globals=state.variables,
                )
            except BaseException as error:  # noqa: BLE001  the value's own code may raise anything
                whose = "" if isinstance(error, UnpicklableError) else f"{class_name(error)}: "
                problem, text = whose + text_of(error), text or _text_of(self._value)
        described = None if failure is None else failures.describe(failure, state)
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
            memory=_memory(),
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
    size = state.configure.world_size if world is None else world.world_size

    def parts(n: int) -> list[slice]:
        return [part_of(n, rank, size) for rank in range(size)]

    return tuple(show_value(variables[name], store, parts) if name in variables else None for name in names)


def snapshot(value: Any) -> Any:
    """Copy a shared array or a file's: the value is that of the cell's end, not a view of it."""
    if isinstance(value, np.ndarray) and (isinstance(value, np.memmap) or sharing.is_shared(value)):
        return value.copy()
    return value


def _text_of(value: Any) -> str:
    """Return the text of what a call returned or a variable holds; a cell's value is text already."""
    try:
        return repr(value)
    except BaseException:  # noqa: BLE001  it is the user's class
        return ""


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
