"""The whole of `multiprocessing` for numpy arrays in shared memory, and for notebooks.

Write ``import nbparallel.multiprocessing as mp`` where ``import multiprocessing as mp`` stood.
"""

from __future__ import annotations

import importlib
from typing import Any

from nbparallel.multiprocessing.context import _default_context

__all__ = [name for name in dir(_default_context) if not name.startswith("_")]
globals().update((name, getattr(_default_context, name)) for name in __all__)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:  # a module of the library that has none beside it here
        return importlib.import_module(f"multiprocessing.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
