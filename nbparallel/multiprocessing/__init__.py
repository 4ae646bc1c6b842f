"""The whole of `multiprocessing` for numpy arrays in shared memory, and for notebooks.

Write ``import nbparallel.multiprocessing as mp`` where ``import multiprocessing as mp`` stood.
"""

from __future__ import annotations

import importlib
import typing
from typing import Any

from nbparallel.multiprocessing.context import _default_context

if typing.TYPE_CHECKING:  # its name alone would be one more of ours; the library's types are true of ours
    from multiprocessing import *  # noqa: F403
    from multiprocessing import reducer as reducer

    from nbparallel.multiprocessing.workers import register_joblib as register_joblib
    from nbparallel.multiprocessing.workers.batches import (
        default_collate as default_collate,
        get_worker_info as get_worker_info,
    )
    from nbparallel.multiprocessing.workers.data_loader import DataLoader as DataLoader
    from nbparallel.multiprocessing.workers.executor import Executor as Executor
    from nbparallel.multiprocessing.workers.spawned_processes import (
        ProcessContext as ProcessContext,
        ProcessException as ProcessException,
        ProcessExitedException as ProcessExitedException,
        ProcessRaisedException as ProcessRaisedException,
        spawn as spawn,
        start_processes as start_processes,
    )
    from nbparallel.sharing import (
        get_all_sharing_strategies as get_all_sharing_strategies,
        get_sharing_strategy as get_sharing_strategy,
        set_sharing_strategy as set_sharing_strategy,
    )

_OURS = {
    ".workers": ("register_joblib",),
    ".workers.executor": ("Executor",),
    ".workers.data_loader": ("DataLoader",),
    ".workers.batches": ("default_collate", "get_worker_info"),
    ".workers.spawned_processes": (
        "ProcessContext",
        "ProcessException",
        "ProcessExitedException",
        "ProcessRaisedException",
        "spawn",
        "start_processes",
    ),
    "nbparallel.sharing": ("get_all_sharing_strategies", "get_sharing_strategy", "set_sharing_strategy"),
}
"""Modules that load numpy, or what else the library would not -> names that only we and torch have."""
_ON_DEMAND = {name: module for module, names in _OURS.items() for name in names}
_ELSEWHERE = {"ProcessPoolExecutor": "Executor", "SpawnContext": "ProcessContext"}
"""Names of concurrent.futures and torch -> ours."""
_LIBRARY: list[str] = [name for name in dir(_default_context) if not name.startswith("_")]
globals().update((name, getattr(_default_context, name)) for name in _LIBRARY)
__all__: list[str] = [*_LIBRARY, *_ON_DEMAND]  # noqa: PLE0604


def _find(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _ON_DEMAND:
        found = getattr(importlib.import_module(_ON_DEMAND[name], __name__), name)
        globals()[name] = found
        return found
    # ``from nbparallel.multiprocessing import queues`` asks here before it imports our module of that name
    for package in (__name__, "multiprocessing"):
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
    library = vars(importlib.import_module("multiprocessing"))
    if name in library:  # what no context has: SUBDEBUG, SUBWARNING
        return library[name]
    if name in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: use {_ELSEWHERE[name]!r}")
    raise importlib.import_module("nbparallel.errors").misspelt(name, __name__, __all__)


if not typing.TYPE_CHECKING:  # a checker would take every name for one of this module
    __getattr__ = _find


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *__all__})
