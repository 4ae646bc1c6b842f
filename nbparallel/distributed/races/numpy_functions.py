"""Functions of numpy that traced arrays are passed to, and methods of arrays: what each reads and writes.

A function whose result is a view of an argument has not read it.  Any other reads all arrays that it is
passed, `out` is written, and the tables name those that read less, or write into an argument.
`tests/distributed/races/recording/test_access_paths.py` compares the tables with what numpy has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_log import READ, WRITE
from nbparallel.distributed.races.access_recorder import offsets_at
from nbparallel.distributed.races.traced_array import (
    TracedArray,
    arrays_in,
    plain,
    plain_value,
    read,
    recorder,
    replaced,
    seen,
    touch,
    touch_at,
    trace,
    traced_in,
)

_SEVERAL = np.zeros(2)
"""As a value that was written: not one."""


def _array_ufunc(
    self: Any,
    ufunc: np.ufunc,
    method: str,
    *inputs: Any,
    out: tuple[Any, ...] | None = None,
    **options: Any,
) -> Any:
    """Compute with plain arrays; record what is read, and what `out` receives."""
    arguments = [plain_value(x) for x in inputs]
    choices = {name: plain_value(option) for name, option in options.items()}
    if out is not None:
        choices["out"] = tuple(plain_value(x) for x in out)
    found: Any = getattr(ufunc, method)(*arguments, **choices)
    if recorder() is not None:
        for name, option in options.items():
            if name != "where":
                read(option)
        where = choices.get("where", True)
        if method == "at":
            read(inputs[1:])  # indices, values
            touch_at(inputs[0], arguments[1], READ)
            touch_at(inputs[0], arguments[1], WRITE, _SEVERAL)
        elif where is True:
            read(inputs)
            for x in out or ():
                touch(x, WRITE)
        else:
            _record_where(method, inputs, out, options["where"], where)
    if out is None:
        return found
    if type(found) is not tuple:
        return found if out[0] is None else out[0]
    return tuple(result if given is None else given for given, result in zip(out, found, strict=True))


def _record_where(method: str, inputs: Any, out: Any, given: Any, where: Any) -> None:
    """Record what a mask chooses, to whose shape arguments are broadcast."""
    read(given)
    touched = [(x, READ) for x in inputs]
    if method == "__call__":
        touched += [(x, WRITE) for x in out or () if x is not None]
    else:  # a reduction writes all of its result
        for x in out or ():
            touch(x, WRITE)
    shape = np.broadcast_shapes(np.shape(where), *(np.shape(x) for x, _ in touched))
    chosen, to = np.broadcast_to(np.asarray(where, bool), shape), recorder()
    for x, kind in touched:
        if type(x) is TracedArray and to is not None:
            to.elements(plain(x), offsets_at(np.broadcast_to(plain(x), shape), chosen), kind, _SEVERAL)


TracedArray.__array_ufunc__ = _array_ufunc  # type: ignore[method-assign]


Arguments = dict[str, Any]
Effect = Callable[[Arguments, Arguments], None]
"""Records what a call does: its arguments by name, and the same with plain arrays."""


def _take(given: Arguments, plain: Arguments) -> None:
    read(given["indices"])
    array = plain["a"]
    if type(given["a"]) is TracedArray:
        taken = np.take(**{**plain, "a": np.arange(array.size).reshape(array.shape), "out": None})
        touch_at(given["a"], np.unravel_index(taken, array.shape), READ)


def _writing(function: Callable[..., Any], target: str, value: str) -> Effect:
    """Return the effect of a function that writes some elements of a parameter, and reads the others.

    It writes a mark in their places: so numpy itself says which elements these are.
    """

    def effect(given: Arguments, plain: Arguments) -> None:
        for name, x in given.items():
            if name != target:
                read(x)
        array = given[target]
        if type(array) is TracedArray and np.size(plain[value]):
            marks, rest = np.zeros(array.shape, bool), {**plain, value: np.ones(1, bool)}
            del rest[target]
            function(marks, **rest)
            if marks.all():
                touch(array, WRITE, plain[value])
            else:
                touch_at(array, marks, WRITE, plain[value])

    return effect


EFFECTS: dict[str, Effect] = {
    "copyto": _writing(np.copyto, "dst", "src"),
    "fill": _writing(lambda marks, **_: marks.fill(True), "a", "value"),
    "fill_diagonal": _writing(np.fill_diagonal, "a", "val"),
    "full_like": lambda given, _: read(given.get("fill_value")),
    "place": _writing(np.place, "arr", "vals"), "put": _writing(np.put, "a", "v"),
    "putmask": _writing(np.putmask, "a", "values"), "take": _take,
}  # fmt: skip
"""By name of the function, or of the method that is the same."""


METADATA = frozenset({
    "shape", "ndim", "size", "result_type", "can_cast", "may_share_memory", "shares_memory", "zeros_like",
    "empty_like", "ones_like", "min_scalar_type", "iscomplexobj", "isrealobj", "common_type", "byte_bounds",
    "broadcast_shapes", "isfortran", "diag_indices_from", "tril_indices_from", "triu_indices_from",
    "einsum_path",
})  # fmt: skip
"""Look at shape, dtype and place of their arrays only."""
COMPOSED = frozenset({
    "all", "amax", "amin", "any", "max", "mean", "min", "prod", "std", "sum", "var", "sometrue", "alltrue",
    "apply_along_axis", "apply_over_axes", "extract", "put_along_axis",
    "take_along_axis", "tril", "triu",
})  # fmt: skip
"""Written in Python, with steps that are all seen: they get the traced arrays."""
READ_AND_VIEW = frozenset({"trim_zeros", "real_if_close"})
"""Read what they return a view of."""
_OVERWRITING = ("median", "nanmedian", "nanpercentile", "nanquantile", "percentile", "quantile")
IN_PLACE = {**dict.fromkeys(_OVERWRITING, "overwrite_input"), "byteswap": "inplace"}
"""Write into the array that they read, if this argument is True."""
_POSITIONS = {
    "where": ("condition", "x", "y"),
    "putmask": ("a", "mask", "values"),
    "copyto": ("dst", "src", "casting", "where"),
    "dot": ("a", "b", "out"),
    "concatenate": ("arrays", "axis", "out"),
}
"""Of functions in C, whose arguments some versions of numpy hide."""


def _array_function(self: Any, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of numpy with plain arrays; record what it reads and writes."""
    name = getattr(func, "__name__", "")
    if getattr(np, name, None) is not func:
        name = ""  # another of the same name, as `np.linalg.trace`
    composed = name in COMPOSED or (name == "nan_to_num" and _is_in_place(*args, **kwargs))
    if composed and recorder() is not None:
        return np.ndarray.__array_function__(self, func, types, args, kwargs)
    return call_recorded(func, name, _parameters(func), args, kwargs)


def _is_in_place(x: Any = None, copy: bool = True, *_: Any, **__: Any) -> bool:
    return not copy


@cache
def _parameters(func: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of arguments that may be given by position; some versions of numpy hide them."""
    known = _POSITIONS.get(getattr(func, "__name__", ""))
    if known is not None:
        return known
    try:
        found = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in found if one.kind in by_position)


def call_recorded(
    call: Callable[..., Any], name: str, parameters: tuple[str, ...], args: Any, options: dict[str, Any]
) -> Any:
    """Call with plain arrays, and record what happens to traced ones.

    Parameters
    ----------
    name : str
        Of a function of numpy, or of a method that is the same; else empty.
    parameters : tuple of str
        Names of the arguments by position, as far as they are known.
    """
    to = recorder()
    found = call(*map(plain_value, args), **{key: plain_value(x) for key, x in options.items()})
    given = {**dict(zip(parameters, args, strict=False)), **options}
    outputs = given.get("out")
    if to is not None and name not in METADATA:
        rest = args[len(parameters) :] if parameters else args
        _record(name, given, [*rest, *(x for key, x in given.items() if key != "out")], found)
        for x in traced_in(outputs):
            touch(x, WRITE)
    if any(True for _ in traced_in(outputs)):
        return outputs[0] if type(outputs) is tuple and len(outputs) == 1 else outputs
    return retraced(found, traced_in((args, options)))


def _record(name: str, given: dict[str, Any], inputs: list[Any], found: Any) -> None:
    effect = EFFECTS.get(name)
    if effect is not None:
        effect(given, {key: plain_value(x) for key, x in given.items()})
        return
    results = list(arrays_in(found)) if given.get("out") is None else []
    in_place = given.get(IN_PLACE.get(name, ""))
    for x in traced_in(inputs):
        if in_place or name in READ_AND_VIEW or not any(np.may_share_memory(result, x) for result in results):
            read(x)
        if in_place:
            touch(x, WRITE)


def retraced(found: Any, inputs: Iterable[TracedArray]) -> Any:
    """Return a result in which views of traced arguments are traced."""
    kept = list(inputs)
    return replaced(
        found, {np.ndarray: lambda x: trace(x) if any(np.may_share_memory(x, one) for one in kept) else x}
    )


TracedArray.__array_function__ = _array_function  # type: ignore[method-assign]


# Methods that go through neither ufuncs nor array functions: what each reads and writes.

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
EXPOSING = (
    "data", "ctypes", "__array__", "__array_interface__", "__array_struct__", "__buffer__", "__dlpack__",
)  # fmt: skip
"""Give the memory away: CPython asks for a `__buffer__` from 3.12 on."""


def _reading_method(name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    original: Any = getattr(np.ndarray, name, None)
    special = name if name in EFFECTS or name in IN_PLACE else ""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return call_recorded(original, special, parameters, (self, *args), options)

    return method


def _writing_method(name: str) -> Callable[..., Any]:
    reading = _reading_method(name, ())

    def method(self: Any, *args: Any, **options: Any) -> Any:
        found = reading(self, *args, **options)
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
    touch_at(self, key if type(key) is tuple else np.unravel_index(key % self.size, self.shape), READ)
    return found


def _bytes(self: Any) -> bytes:
    touch(self, READ)
    return bytes(plain(self))


def _settable(get: Callable[[Any], Any]) -> property:
    """Return a property to all of whose elements can be assigned."""

    def put(self: Any, value: Any) -> None:
        get(self)[...] = seen(value)

    return property(get, put)


class TracedFlat:
    """The `flat` of an array: elements that are taken are read, or written; a loop, or a copy, reads all."""

    def __init__(self, array: TracedArray) -> None:
        self._array, self._flat = array, plain(array).flat

    def __getitem__(self, key: Any, kind: int = READ, value: Any = None) -> Any:
        marks = np.zeros(self._array.shape, bool)
        marks.flat[key := seen(key)] = True
        touch_at(self._array, marks, kind, value)
        return self._flat[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._flat[seen(key)] = value = seen(value)
        self.__getitem__(key, WRITE, value)


def _flat_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        read(args if name == "__len__" else (self._array, args))
        return getattr(self._flat, name)(*map(plain_value, args), **options)

    return method


for _name in ("array", "eq", "getattribute", "iter", "len", "ne", "next"):
    setattr(TracedFlat, f"__{_name}__".replace("getattribute", "getattr"), _flat_method(f"__{_name}__"))


def _exposing(name: str) -> Callable[[Any], Any]:
    """Return what gets an attribute that gives the memory away: from now on it may be read, and written."""
    door = "memoryview" if name == "__buffer__" else name

    def get(self: Any) -> Any:
        expose(self, door)
        return getattr(plain(self), name)

    return get


def expose(array: Any, door: str) -> None:
    """Record that code that numpy does not see may touch the memory of an array until the cell ends."""
    to = recorder()
    if to is not None and type(array) is TracedArray:
        to.expose(plain(array), door)


_METHODS: dict[str, Any] = {
    **{name: _reading_method(name, READING.get(name, ())) for name in (*READING, *VIEWS)},
    **{name: _writing_method(name) for name in WRITING},
    **{name: property(_exposing(name)) for name in EXPOSING}, "flat": _settable(TracedFlat),
    **{name: _settable(getattr(np.ndarray, name).__get__) for name in ("real", "imag")},
    "item": _item, "view": _view,
}  # fmt: skip
for _name, _method in _METHODS.items():
    if hasattr(np.ndarray, _name):  # in this version of numpy
        setattr(TracedArray, _name, _method)
setattr(TracedArray, "__bytes__", _bytes)  # noqa: B010  which plain ones do not need
