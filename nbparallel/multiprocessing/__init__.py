"""The whole of `multiprocessing` for numpy arrays in shared memory, and for notebooks.

Write ``import nbparallel.multiprocessing as mp`` where ``import multiprocessing as mp`` stood.
"""

from __future__ import annotations

import importlib
import typing
from typing import Any

from nbparallel.multiprocessing.context import _default_context

if typing.TYPE_CHECKING:  # its name alone would be one more of ours; the library's types are true of ours
    from multiprocessing import Array as Array
    from multiprocessing import AuthenticationError as AuthenticationError
    from multiprocessing import Barrier as Barrier
    from multiprocessing import BoundedSemaphore as BoundedSemaphore
    from multiprocessing import BufferTooShort as BufferTooShort
    from multiprocessing import Condition as Condition
    from multiprocessing import Event as Event
    from multiprocessing import JoinableQueue as JoinableQueue
    from multiprocessing import Lock as Lock
    from multiprocessing import Manager as Manager
    from multiprocessing import Pipe as Pipe
    from multiprocessing import Pool as Pool
    from multiprocessing import Process as Process
    from multiprocessing import ProcessError as ProcessError
    from multiprocessing import Queue as Queue
    from multiprocessing import RawArray as RawArray
    from multiprocessing import RawValue as RawValue
    from multiprocessing import RLock as RLock
    from multiprocessing import Semaphore as Semaphore
    from multiprocessing import SimpleQueue as SimpleQueue
    from multiprocessing import TimeoutError as TimeoutError
    from multiprocessing import Value as Value
    from multiprocessing import active_children as active_children
    from multiprocessing import allow_connection_pickling as allow_connection_pickling
    from multiprocessing import cpu_count as cpu_count
    from multiprocessing import current_process as current_process
    from multiprocessing import freeze_support as freeze_support
    from multiprocessing import get_all_start_methods as get_all_start_methods
    from multiprocessing import get_context as get_context
    from multiprocessing import get_logger as get_logger
    from multiprocessing import get_start_method as get_start_method
    from multiprocessing import log_to_stderr as log_to_stderr
    from multiprocessing import parent_process as parent_process
    from multiprocessing import reducer as reducer
    from multiprocessing import set_executable as set_executable
    from multiprocessing import set_forkserver_preload as set_forkserver_preload
    from multiprocessing import set_start_method as set_start_method

    from nbparallel.multiprocessing.workers.executor import Executor as Executor
    from nbparallel.multiprocessing.workers.joblib_registration import register_joblib as register_joblib
    from nbparallel.multiprocessing.workers.loading.collation import default_collate as default_collate
    from nbparallel.multiprocessing.workers.loading.data_loader import DataLoader as DataLoader
    from nbparallel.multiprocessing.workers.loading.loader_worker import get_worker_info as get_worker_info
    from nbparallel.multiprocessing.workers.spawned_processes import ProcessContext as ProcessContext
    from nbparallel.multiprocessing.workers.spawned_processes import ProcessException as ProcessException
    from nbparallel.multiprocessing.workers.spawned_processes import (
        ProcessExitedException as ProcessExitedException,
    )
    from nbparallel.multiprocessing.workers.spawned_processes import (
        ProcessRaisedException as ProcessRaisedException,
    )
    from nbparallel.multiprocessing.workers.spawned_processes import spawn as spawn
    from nbparallel.multiprocessing.workers.spawned_processes import start_processes as start_processes
    from nbparallel.sharing import get_all_sharing_strategies as get_all_sharing_strategies
    from nbparallel.sharing import get_sharing_strategy as get_sharing_strategy
    from nbparallel.sharing import set_sharing_strategy as set_sharing_strategy

_OURS = {
    ".workers.executor": ("Executor",),
    ".workers.joblib_registration": ("register_joblib",),
    ".workers.loading.collation": ("default_collate",),
    ".workers.loading.data_loader": ("DataLoader",),
    ".workers.loading.loader_worker": ("get_worker_info",),
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
