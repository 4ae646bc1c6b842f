"""The whole of `multiprocessing` for numpy arrays in shared memory, and for notebooks.

Write ``import nbparallel.multiprocessing as mp`` where ``import multiprocessing as mp`` stood.
"""

from __future__ import annotations

import importlib
import typing
from typing import Any

from nbparallel.multiprocessing.context import _default_context

if typing.TYPE_CHECKING:  # its name alone would be one more of ours
    from nbparallel.multiprocessing.workers.executor import Executor as Executor
    from nbparallel.multiprocessing.workers.loading.collation import default_collate as default_collate
    from nbparallel.multiprocessing.workers.loading.data_loader import DataLoader as DataLoader
    from nbparallel.multiprocessing.workers.loading.loader_worker import get_worker_info as get_worker_info

_ON_DEMAND = {
    "DataLoader": "workers.loading.data_loader",
    "Executor": "workers.executor",
    "default_collate": "workers.loading.collation",
    "get_worker_info": "workers.loading.loader_worker",
}
"""Names beyond the library's -> their modules, which load numpy, or what else the library would not."""
_LIBRARY = [name for name in dir(_default_context) if not name.startswith("_")]
globals().update((name, getattr(_default_context, name)) for name in _LIBRARY)
__all__ = [*_LIBRARY, "DataLoader", "Executor", "default_collate", "get_worker_info"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _ON_DEMAND:
        found = getattr(importlib.import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
        globals()[name] = found
        return found
    # ``from nbparallel.multiprocessing import queues`` asks here before it imports our module of that name
    for package in (__name__, "multiprocessing"):
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
