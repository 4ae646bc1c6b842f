"""Methods of arrays that go through neither ufuncs nor array functions: what each reads and writes.

`tests/distributed/races/recording/test_access_paths.py` compares the tables with what numpy has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbparallel.distributed.races import traced_array
from nbparallel.distributed.races.access_log import READ, WRITE
from nbparallel.distributed.races.numpy_functions import EFFECTS, IN_PLACE, call_recorded
from nbparallel.distributed.races.traced_array import (
    TracedArray,
    TracedFlat,
    plain,
    seen,
    touch,
    trace,
)

_OUT = ("a", "axis", "out")
READING: dict[str, tuple[str, ...]] = {
    "argmax": _OUT, "argmin": _OUT, "argpartition": (), "argsort": (), "astype": (),
    "byteswap": ("a", "inplace"), "choose": ("a", "choices", "out", "mode"),
    "compress": ("a", "condition", "axis", "out"), "copy": (),
    "cumprod": ("a", "axis", "dtype", "out"), "cumsum": ("a", "axis", "dtype", "out"),
    "dot": ("a", "b", "out"), "dump": (), "dumps": (), "fill": ("a", "value"), "flatten": (), "nonzero": (),
    "put": ("a", "ind", "v", "mode"), "repeat": (), "round": ("a", "decimals", "out"), "searchsorted": (),
    "take": ("a", "indices", "axis", "out", "mode"), "tobytes": (), "tofile": (), "tolist": (),
    "tostring": (), "trace": ("a", "offset", "axis1", "axis2", "dtype", "out"), "__bool__": (),
    "__complex__": (), "__copy__": (), "__deepcopy__": (), "__float__": (), "__format__": (),
    "__index__": (), "__int__": (), "__reduce__": (), "__reduce_ex__": (), "__repr__": (), "__str__": (),
}  # fmt: skip
"""Read, and return something new: with the names of their arguments, as the function of numpy has them."""
VIEWS = (
    "diagonal", "getfield", "newbyteorder", "reshape", "ravel", "squeeze", "swapaxes", "to_device",
    "transpose",
)  # fmt: skip
"""Return a view, which is no access; `reshape` and `ravel` copy where they must."""
WRITING = ("sort", "partition")
"""Read and write all elements."""
GIVING = ("__array__", "__buffer__", "__dlpack__")
EXPOSING = ("data", "ctypes", "__array_interface__", "__array_struct__")
"""Methods and properties that give the memory away: CPython asks for a `__buffer__` from 3.12 on."""
SPECIAL = ("item", "view", "real", "imag", "flat")
"""Written out below."""


def _reading(name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    original: Any = getattr(np.ndarray, name, None)
    special = name if name in EFFECTS or name in IN_PLACE else ""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return call_recorded(original, special, parameters, (self, *args), options)

    return method


def _writing(name: str) -> Callable[..., Any]:
    original: Any = getattr(np.ndarray, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        found = original(plain(self), *map(seen, args), **{key: seen(x) for key, x in options.items()})
        touch(self, READ)
        touch(self, WRITE)
        return found

    return method


def _view(self: Any, *args: Any, **options: Any) -> Any:
    """Return a view: traced, but for one of another class, which numpy does not show."""
    found = np.ndarray.view(self, *args, **options)
    if type(found) is np.ndarray:
        return trace(found)
    if type(found) is not TracedArray:
        expose(self, f"{type(found).__module__}.{type(found).__name__}")
    return found


def _item(self: Any, *args: Any) -> Any:
    found = plain(self).item(*args)
    key: Any = args[0] if len(args) == 1 else args
    _ = self[key] if type(key) is tuple and key else self.flat[key or 0]  # the same element: read
    return found


def _bytes(self: Any) -> bytes:
    touch(self, READ)
    return bytes(plain(self))


def _settable(name: str, get: Callable[[Any], Any]) -> property:
    """Return a property that is a view, to which all elements can be assigned."""

    def put(self: Any, value: Any) -> None:
        get(self)[...] = value

    return property(get, put)


def _giving(name: str) -> Callable[..., Any]:
    """Return a method that gives the memory away: from now on it may be read, and written."""
    door = "memoryview" if name == "__buffer__" else name

    def method(self: Any, *args: Any, **options: Any) -> Any:
        expose(self, door)
        return getattr(plain(self), name)(*args, **options)

    return method


def _exposed(name: str) -> property:
    """Return a property that does."""

    def get(self: Any) -> Any:
        expose(self, name)
        return getattr(plain(self), name)

    return property(get)


def expose(array: Any, door: str) -> None:
    """Record that code that numpy does not see may touch the memory of an array until the cell ends."""
    recorder = traced_array.recorder()
    if recorder is not None and type(array) is TracedArray:
        recorder.expose(plain(array), door)


_METHODS: dict[str, Any] = {
    **{name: _reading(name, READING.get(name, ())) for name in (*READING, *VIEWS)},
    **{name: _writing(name) for name in WRITING},
    **{name: _giving(name) for name in GIVING},
    **{name: _exposed(name) for name in EXPOSING},
    **{name: _settable(name, getattr(np.ndarray, name).__get__) for name in ("real", "imag")},
    "flat": _settable("flat", TracedFlat), "item": _item, "view": _view,
}  # fmt: skip
for _name, _method in _METHODS.items():
    if hasattr(np.ndarray, _name):  # in this version of numpy
        setattr(TracedArray, _name, _method)
setattr(TracedArray, "__bytes__", _bytes)  # noqa: B010  which plain ones do not need
