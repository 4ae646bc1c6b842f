"""Tasks that run no cell: call a function, take the values of a variable, assign variables.

What a cell shows last is shown as text if it cannot travel, and a line says so.  A caller that asked for
values alone gets them all, or an error: a text in the place of one would be found much later, if at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from nbparallel.errors import UnpicklableError, rank_list
from nbparallel.session.names.encoding import dump
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.results import CellResult, RankValues, RemoteValue
from nbparallel.session.tasks.task_run import TaskFactory
from nbparallel.sharing.memory.mapping import Files
from nbparallel.wire.messages import CallTask, DrawTask, PullTask, PushTask, Task


def call_task(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> TaskFactory:
    """Return what makes the task of `Session.call`."""
    called = partial(function, **kwargs) if kwargs else function

    def make(pool: RankPool, number: int, ranks: tuple[int, ...]) -> tuple[Task, object]:
        parts = {"the function": function, **{f"argument {n}": arg for n, arg in enumerate(args, 1)}}
        parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
        pickled = dump((called, args), parts, pool.supervisor.broker, pool.store)
        return CallTask(number, ranks, (), True, None, pickled.data), pickled

    return make


def pull_task(name: str) -> TaskFactory:
    """Return what makes the task of `Session.pull`."""
    return lambda _, number, ranks: (PullTask(number, ranks, (), True, None, name), None)


def draw_task(names: tuple[str, ...]) -> TaskFactory:
    """Return what makes the task of `Session.draw`."""
    return lambda _, number, ranks: (DrawTask(number, ranks, (), False, None, names), None)


def push_task(values: Mapping[str, Any]) -> TaskFactory:
    """Return what makes the task of `Session.push`."""

    def make(pool: RankPool, number: int, ranks: tuple[int, ...]) -> tuple[Task, object]:
        pickled = dump(values, values, pool.supervisor.broker, pool.store, Files.PRIVATE)
        return PushTask(number, ranks, (), False, None, pickled.data), pickled

    return make


def all_values(result: CellResult, what: str) -> RankValues:
    """Return the values of `what`, of all ranks.

    Raises
    ------
    UnpicklableError
        Some cannot travel; the error's `result` has the others.
    FileDescriptorLimitError, SharedMemoryFullError
        This process lacks what it needs to receive them.
    """
    stayed = [value for value in result.values if isinstance(value, RemoteValue)]
    if stayed:
        reason = stayed[0].reason
        ranks = rank_list(value.rank for value in stayed if value.reason == reason)
        error = stayed[0].error or UnpicklableError(f"{what} stayed on {ranks}: {reason}")
        error.result = result  # type: ignore[attr-defined]  # as `ParallelError.result`
        raise error
    return result.values
