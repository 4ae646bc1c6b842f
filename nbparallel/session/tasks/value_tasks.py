"""Tasks that run no cell: call a function, take the values of a variable, assign variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbparallel.session.names.encoding import cell_sources, dump
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.tasks.task_run import TaskFactory
from nbparallel.wire.messages import CallTask, PullTask, PushTask, Task


def call_task(function: Callable[..., Any], args: tuple[Any, ...]) -> TaskFactory:
    """Return what makes the task of `Session.call`."""

    def make(pool: RankPool, number: int, ranks: tuple[int, ...]) -> tuple[Task, object]:
        parts = {"the function": function, **{f"argument {n}": arg for n, arg in enumerate(args, 1)}}
        pickled = dump((function, args), parts, pool.supervisor.broker)
        sources = cell_sources(pickled.files)
        return CallTask(number, ranks, (), True, None, pickled.data, sources=sources), pickled

    return make


def pull_task(name: str) -> TaskFactory:
    """Return what makes the task of `Session.pull`."""
    return lambda _, number, ranks: (PullTask(number, ranks, (), True, None, name), None)


def push_task(values: Mapping[str, Any]) -> TaskFactory:
    """Return what makes the task of `Session.push`."""

    def make(pool: RankPool, number: int, ranks: tuple[int, ...]) -> tuple[Task, object]:
        pickled = dump(values, values, pool.supervisor.broker)
        return PushTask(number, ranks, (), False, None, pickled.data), pickled

    return make
