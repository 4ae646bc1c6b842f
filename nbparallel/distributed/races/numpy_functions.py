"""Functions of numpy that traced arrays are passed to: what each reads and writes.

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
import numpy.typing as npt

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
            _record_at(inputs, arguments)
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


def _record_at(inputs: Any, arguments: list[Any]) -> None:
    """Record ``np.add.at(x, indices, values)``: indices and values, and the elements in place."""
    read(inputs[1:])
    touch_at(inputs[0], arguments[1], READ)
    touch_at(inputs[0], arguments[1], WRITE, _SEVERAL)


def _record_where(method: str, inputs: Any, out: Any, given: Any, where: Any) -> None:
    read(given)
    mask = np.asarray(where, bool)
    outputs = [x for x in out or () if x is not None]
    if method == "__call__":
        shape = np.broadcast_shapes(mask.shape, *(np.shape(x) for x in (*inputs, *outputs)))
    else:
        shape = np.broadcast_shapes(mask.shape, np.shape(inputs[0]))
    chosen = np.broadcast_to(mask, shape)
    for x in inputs:
        touch_where(x, chosen, READ)
    for x in outputs:
        if method == "__call__":
            touch_where(x, chosen, WRITE)
        else:
            touch(x, WRITE)  # a reduction writes all of its result


def touch_where(x: Any, mask: npt.NDArray[np.bool_], kind: int) -> None:
    """Record that an argument is touched where a mask says so, to whose shape it is broadcast."""
    to = recorder()
    if type(x) is not TracedArray or to is None:
        return
    wide = np.broadcast_to(plain(x), mask.shape)
    to.elements(plain(x), offsets_at(wide, mask), kind, _SEVERAL)


TracedArray.__array_ufunc__ = _array_ufunc  # type: ignore[method-assign]


Arguments = dict[str, Any]
Effect = Callable[[Arguments, Arguments], None]
"""Records what a call does: its arguments by name, and the same with plain arrays."""


def _take(given: Arguments, plain: Arguments) -> None:
    read(given["indices"])
    array, indices = plain["a"], np.asarray(plain["indices"]).astype(np.int64)
    axis, mode = plain.get("axis"), plain.get("mode", "raise")
    if type(given["a"]) is not TracedArray or not indices.size:
        return
    size = array.size if axis is None else array.shape[axis]
    at = np.clip(indices, 0, size - 1) if mode in ("clip", 1) else indices % size
    key: Any = (*(slice(None),) * (axis % array.ndim), at) if axis is not None else None
    touch_at(given["a"], np.unravel_index(at, array.shape) if key is None else key, READ)


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


def _fill(given: Arguments, plain: Arguments) -> None:
    read(given["value"])
    touch(given["a"], WRITE, plain["value"])


def _full_like(given: Arguments, plain: Arguments) -> None:
    read(given.get("fill_value"))


EFFECTS: dict[str, Effect] = {
    "copyto": _writing(np.copyto, "dst", "src"), "fill": _fill, "full_like": _full_like,
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
    "apply_along_axis", "apply_over_axes", "extract", "fill_diagonal", "put_along_axis",
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
