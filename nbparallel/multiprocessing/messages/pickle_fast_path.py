"""Pickling of what needs nothing of ours: as soon as the library does it, without loading numpy.

An attempt ends at the first object that may need us, *before* its own code runs: an object whose
``__reduce__`` has effects, such as a connection that is duplicated, is never reduced twice.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import traceback
import types
from collections import ChainMap
from multiprocessing import pool
from multiprocessing.reduction import ForkingPickler
from typing import Any


def reduce_raised(carrier: Any) -> tuple[Any, ...]:
    """Reduce an exception with its traceback: pickled once, by itself, as its own code may raise anything."""
    from nbparallel.errors.questions import ask, class_name
    from nbparallel.transfer.cell_sources import name_cells
    from nbparallel.transfer.pickling import dump_error

    rebuild, (error, text) = carrier.__reduce__()
    data = ask(lambda: dump_error(error), lambda: None)
    name = class_name(error)
    last = ask(lambda: "".join(traceback.format_exception_only(error)).strip(), lambda: name)
    return rebuild_raised, (rebuild, data, name, last, name_cells(text))


def rebuild_raised(rebuild: Any, data: bytes | None, name: str, last: str, text: str) -> Any:
    """Rebuild an exception with its traceback; one that has not arrived is a `RemoteError`."""
    from nbparallel.errors import RemoteError
    from nbparallel.errors.questions import ask
    from nbparallel.transfer.pickling import load_error

    error = None if data is None else ask(lambda: load_error(data), lambda: None)
    if error is None:
        error = RemoteError(f"{last} [it cannot be rebuilt]", ename=name, evalue=last.partition(": ")[2])
    return rebuild(error, text)


RAISED: dict[type, Any] = {pool.ExceptionWithTraceback: reduce_raised}  # type: ignore[attr-defined]
"""Reducers of what the library's workers send for an exception; `executor` adds its own."""
_PLAIN_MODULES = frozenset(
    {"builtins", "multiprocessing.managers", "multiprocessing.pool", "multiprocessing.process"}
)
"""Modules whose classes reduce without effects; what such objects hold is looked at in turn."""
_REDUCERS = ChainMap[Any, Any](
    RAISED,
    ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    copyreg.dispatch_table,
)
"""The tables that the library's pickler copies for each message."""
_MAIN = frozenset({"__main__", "__mp_main__"})


class _Unfit(Exception):  # noqa: N818 - it is no error
    """The object needs our own pickler."""


class _LightPickler(pickle.Pickler):
    dispatch_table = _REDUCERS

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
            if _is_importable(obj):
                return NotImplemented
        elif type(obj).__module__ in _PLAIN_MODULES:
            return NotImplemented
        raise _Unfit


def _is_importable(obj: Any) -> bool:
    """Whether every process finds a function or class under its name."""
    if isinstance(obj, types.MethodType):
        return isinstance(obj.__self__, type) and _is_importable(obj.__self__)
    if isinstance(obj, types.BuiltinFunctionType) and isinstance(obj.__self__, types.ModuleType | None):
        return True
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if module is None or name is None or module in _MAIN or module not in sys.modules:
        return False
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is obj


def try_pickle(obj: Any) -> memoryview | None:
    """Return an ordinary pickle of `obj`; None if it needs our own pickler, or what names the culprit."""
    file = io.BytesIO()
    try:
        _LightPickler(file).dump(obj)
    except (_Unfit, TypeError, AttributeError, pickle.PicklingError, RecursionError):
        return None
    return memoryview(file.getvalue())  # from 3.13 on a file with an exported buffer cannot be closed
