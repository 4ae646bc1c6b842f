"""The library's ``multiprocessing.sharedctypes``, with locks of our default context."""

from __future__ import annotations

from multiprocessing import sharedctypes as library
from typing import Any

from nbparallel.multiprocessing.starting.process_state import concrete_context


def Value(typecode_or_type: Any, *args: Any, lock: Any = True, ctx: Any = None) -> Any:  # noqa: N802
    """Return a shared ctypes object, with a lock."""
    return library.Value(typecode_or_type, *args, lock=lock, ctx=ctx or concrete_context())


def Array(typecode_or_type: Any, size_or_initializer: Any, *, lock: Any = True, ctx: Any = None) -> Any:  # noqa: N802
    """Return a shared ctypes array, with a lock."""
    return library.Array(typecode_or_type, size_or_initializer, lock=lock, ctx=ctx or concrete_context())


def synchronized(obj: Any, lock: Any = None, ctx: Any = None) -> Any:
    """Return a shared object's wrapper that has a lock."""
    return library.synchronized(obj, lock, ctx or concrete_context())


def __getattr__(name: str) -> Any:
    return getattr(library, name)
