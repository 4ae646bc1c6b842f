"""Methods of arrays that go through neither ufuncs nor array functions: what each reads and writes.

`tests/distributed/races/recording/test_access_paths.py` compares the tables with what numpy has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbparallel.distributed.races import traced_array
from nbparallel.distributed.races.access_log import READ, WRITE
from nbparallel.distributed.races.numpy_functions import call_recorded
from nbparallel.distributed.races.traced_array import (
    TracedArray,
    TracedFlat,
    plain,
    read,
    read_printed,
    seen,
    touch,
    trace,
)

_OUT = ("a", "axis", "out")
READING: dict[str, tuple[str, ...]] = {
    "argmax": _OUT, "argmin": _OUT, "argpartition": (), "argsort": (), "astype": (),
    "choose": ("a", "choices", "out", "mode"), "compress": ("a", "condition", "axis", "out"), "copy": (),
    "cumprod": ("a", "axis", "dtype", "out"), "cumsum": ("a", "axis", "dtype", "out"),
    "dot": ("a", "b", "out"), "dump": (), "dumps": (), "flatten": (), "nonzero": (),
    "repeat": (), "round": ("a", "decimals", "out"), "searchsorted": (),
    "take": ("a", "indices", "axis", "out", "mode"), "tobytes": (), "tofile": (), "tolist": (),
    "tostring": (), "trace": ("a", "offset", "axis1", "axis2", "dtype", "out"), "__bool__": (),
    "__complex__": (), "__copy__": (), "__deepcopy__": (), "__float__": (),
    "__index__": (), "__int__": (), "__reduce__": (), "__reduce_ex__": (),
}  # fmt: skip
"""Read, and return something new: with the names of their arguments, as the function of numpy has them."""
VIEWS = (
    "diagonal", "getfield", "newbyteorder", "reshape", "ravel", "squeeze", "swapaxes", "to_device",
    "transpose",
)  # fmt: skip
"""Return a view, which is no access; `reshape` and `ravel` copy where they must."""
WRITING = ("sort", "partition")
"""Read and write all elements."""
SPECIAL = (
    "byteswap", "fill", "item", "itemset", "put", "setfield", "view", "__array__", "__buffer__",
    "__dlpack__", "__eq__", "__format__", "__ne__", "__repr__", "__str__",
)  # fmt: skip
"""Written out below."""
PROPERTIES = ("T", "mT", "real", "imag", "flat", "base")
EXPOSING = ("data", "ctypes", "__array_interface__", "__array_struct__")
"""Give the memory away."""


def _reading(name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    original: Any = getattr(np.ndarray, name, None)
    special = name if name in ("choose", "compress", "take", "trace") else ""

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


def _viewing(name: str) -> Callable[..., Any]:
    original: Any = getattr(np.ndarray, name, None)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        if type(found) is not TracedArray or np.may_share_memory(found, self):
            return found
        read(self)
        return plain(found)

    return method


def _view(self: Any, *args: Any, **options: Any) -> Any:
    """Return a view: traced, but for one of another class, which numpy does not show."""
    found = np.ndarray.view(self, *args, **options)
    if type(found) is np.ndarray:
        return trace(found)
    if type(found) is not TracedArray:
        expose(self, f"{type(found).__module__}.{type(found).__name__}")
    return found


def _byteswap(self: Any, inplace: bool = False) -> Any:
    found = plain(self).byteswap(inplace)
    touch(self, READ)
    if not inplace:
        return found
    touch(self, WRITE)
    return self


def _fill(self: Any, value: Any) -> None:
    value = seen(value)
    plain(self).fill(value)
    touch(self, WRITE, value)


def _item(self: Any, *args: Any) -> Any:
    found = plain(self).item(*args)
    key: Any = args[0] if len(args) == 1 and type(args[0]) is tuple else args
    if len(key) == 1 and self.ndim != 1:
        key = np.unravel_index(key[0] % self.size, self.shape)
    touch(trace(plain(self)[(*(key or (0,) * self.ndim), ...)]), READ)
    return found


def _itemset(self: Any, *args: Any) -> None:
    key: Any = args[0] if len(args) == 2 and type(args[0]) is tuple else args[:-1]
    if len(key) == 1 and self.ndim != 1:
        key = np.unravel_index(key[0] % self.size, self.shape)
    self[key or (0,) * self.ndim] = args[-1]


def _put(self: Any, indices: Any, values: Any, mode: Any = "raise") -> None:
    call_recorded(np.ndarray.put, "put", ("a", "ind", "v", "mode"), (self, indices, values, mode), {})


def _setfield(self: Any, value: Any, dtype: Any, offset: int = 0) -> None:
    value = seen(value)
    plain(self).setfield(value, dtype, offset)
    touch(trace(plain(self).getfield(dtype, offset)), WRITE, value)


def _array(self: Any, *args: Any, **options: Any) -> Any:
    """Return a plain array, which is a view if it can be: it may be read."""
    expose(self, "__array__")
    return plain(self).__array__(*args, **options)


def _dlpack(self: Any, *args: Any, **options: Any) -> Any:
    expose(self, "__dlpack__")
    return plain(self).__dlpack__(*args, **options)


def _buffer(self: Any, flags: int) -> Any:
    """Give the memory away; CPython asks this from 3.12 on."""
    expose(self, "memoryview")
    array: Any = plain(self)
    return array.__buffer__(flags)


def _bytes(self: Any) -> bytes:
    touch(self, READ)
    return bytes(plain(self))


def _repr(self: Any) -> str:
    read_printed(self)
    return repr(plain(self))


def _str(self: Any) -> str:
    read_printed(self)
    return str(plain(self))


def _format(self: Any, spec: str) -> str:
    read_printed(self)
    return format(plain(self), spec)


def _comparing(name: str) -> Callable[..., Any]:
    original: Any = getattr(np.ndarray, name)

    def method(self: Any, other: Any) -> Any:
        if self.dtype.names is None:
            return original(self, other)  # a ufunc
        read(self)
        return original(plain(self), seen(other))

    return method


def _viewed(name: str) -> property:
    original: Any = getattr(np.ndarray, name)

    def get(self: Any) -> Any:
        found = original.__get__(self)
        return found if np.may_share_memory(found, self) else plain(found)  # imag of real numbers: zeros

    def put(self: Any, value: Any) -> None:
        value = seen(value)
        setattr(plain(self), name, value)
        touch(get(self), WRITE, value)

    return property(get, put if name in ("real", "imag") else None)


def _get_flat(self: Any) -> TracedFlat:
    return TracedFlat(self)


def _set_flat(self: Any, value: Any) -> None:
    plain(self).flat[:] = seen(value)
    touch(self, WRITE, value)


def _get_base(self: Any) -> Any:
    base = np.ndarray.base.__get__(self)
    if type(base) is np.ndarray and _form(base) == _form(self):  # it is what this one stands for
        base = base.base
    return trace(base) if type(base) is np.ndarray else base


def _form(x: Any) -> tuple[Any, ...]:
    array = plain(x)
    return array.ctypes.data, array.shape, array.strides, array.dtype


def _exposed(name: str) -> property:
    """Return a property that gives the memory away: from now on it may be read, and written."""

    def get(self: Any) -> Any:
        expose(self, name)
        return getattr(plain(self), name)

    return property(get)


def expose(array: Any, door: str, *, reads_only: bool = False) -> None:
    """Record that code that numpy does not see may touch the memory of an array until the cell ends."""
    recorder = traced_array.recorder()
    if recorder is not None and type(array) is TracedArray:
        given = plain(array)
        if reads_only:
            given.flags.writeable = False
        recorder.expose(given, door)


def _install(name: str, method: Callable[..., Any]) -> None:
    if hasattr(np.ndarray, name):
        method.__name__, method.__doc__ = name, getattr(np.ndarray, name).__doc__
        setattr(TracedArray, name, method)


_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _reading(name, parameters) for name, parameters in READING.items()},
    **{name: _viewing(name) for name in VIEWS},
    **{name: _writing(name) for name in WRITING},
    **{name: _comparing(name) for name in ("__eq__", "__ne__")},
    "byteswap": _byteswap, "fill": _fill, "item": _item, "itemset": _itemset, "put": _put,
    "setfield": _setfield, "view": _view, "__array__": _array, "__buffer__": _buffer, "__dlpack__": _dlpack,
    "__format__": _format, "__repr__": _repr, "__str__": _str,
}  # fmt: skip
for _name, _method in _METHODS.items():
    _install(_name, _method)
for _name in ("T", "mT", "real", "imag"):
    if hasattr(np.ndarray, _name):
        setattr(TracedArray, _name, _viewed(_name))
for _name in EXPOSING:
    setattr(TracedArray, _name, _exposed(_name))
setattr(TracedArray, "flat", property(_get_flat, _set_flat))  # noqa: B010  read-only to a type checker
setattr(TracedArray, "base", property(_get_base))  # noqa: B010
setattr(TracedArray, "__bytes__", _bytes)  # noqa: B010  which plain ones do not need
