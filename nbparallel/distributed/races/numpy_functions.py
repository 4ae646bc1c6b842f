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

from nbparallel.distributed.races.access_log import READ, WRITE, distinct
from nbparallel.distributed.races.access_recorder import offsets_at
from nbparallel.distributed.races.traced_array import (
    TracedArray,
    arrays_in,
    plain,
    plain_value,
    read,
    read_printed,
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
        elif method == "reduceat":
            _record_parts(inputs, arguments, choices, out)
        elif where is True:
            _record_all(inputs, out)
        else:
            _record_where(method, inputs, out, options["where"], where)
    if out is None:
        return found
    if type(found) is not tuple:
        return found if out[0] is None else out[0]
    return tuple(result if given is None else given for given, result in zip(out, found, strict=True))


def _record_all(inputs: Any, out: Any) -> None:
    for x in inputs:
        read(x)
    for x in out or ():
        touch(x, WRITE)


def _record_at(inputs: Any, arguments: list[Any]) -> None:
    """Record ``np.add.at(x, indices, values)``: indices and values, and the elements in place."""
    for x in inputs[1:]:
        read(x)
    touch_at(inputs[0], arguments[1], READ)
    touch_at(inputs[0], arguments[1], WRITE, _SEVERAL)


def _record_parts(inputs: Any, arguments: list[Any], choices: dict[str, Any], out: Any) -> None:
    """Record ``np.add.reduceat(x, indices)``: parts from index to index, else one element each."""
    for x in inputs[1:]:
        read(x)
    for x in out or ():
        touch(x, WRITE)
    if type(inputs[0]) is not TracedArray:
        return
    array, indices = arguments[0], np.asarray(arguments[1]).reshape(-1)
    axis = (arguments[2] if len(arguments) > 2 else choices.get("axis", 0)) % array.ndim
    change = np.zeros(array.shape[axis] + 1, np.int64)
    ends = np.append(indices[1:], array.shape[axis])
    ends = np.where(ends > indices, ends, indices + 1)
    np.add.at(change, indices, 1)
    np.add.at(change, ends, -1)
    _touch_selected(inputs[0], (*(slice(None),) * axis, np.cumsum(change)[:-1] > 0), READ)


def _touch_selected(array: TracedArray, key: Any, kind: int) -> None:
    touch_at(array, key, kind, _SEVERAL)


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


def _take(given: Arguments, plain: Arguments) -> bool:
    if not {"a", "indices"} <= plain.keys():
        return False
    read(given["indices"])
    array, indices = plain["a"], np.asarray(plain["indices"])
    axis, mode = plain.get("axis"), plain.get("mode", "raise")
    if type(given["a"]) is not TracedArray or not indices.size:
        return True
    if axis is None:
        key: Any = np.unravel_index(_positions(indices, array.size, mode), array.shape)
    else:
        key = (*(slice(None),) * (axis % array.ndim), _positions(indices, array.shape[axis], mode))
    touch_at(given["a"], key, READ)
    return True


def _positions(indices: Any, size: int, mode: str) -> Any:
    """Return indices as `take` and `put` interpret them."""
    indices = np.asarray(indices).astype(np.int64)
    return np.clip(indices, 0, size - 1) if mode in ("clip", 1) else indices % size


def _selecting(
    function: Callable[..., Any], *parameters: str, ignored: tuple[str, ...] = ("out",)
) -> Callable[[Arguments, Arguments], bool]:
    """Return the effect of a function that selects elements of some parameters, and reads the others.

    It selects numbers in their place: so numpy itself says which elements these are.
    """

    def effect(given: Arguments, plain: Arguments) -> bool:
        for name, value in given.items():
            if name not in parameters and name not in ignored:
                read(value)
        nothing = {
            name: [0] * len(x) if _is_several(x := plain[name]) else 0 for name in parameters if name in plain
        }
        if len(nothing) < len(parameters) and "default" not in parameters:
            return True
        rest = {name: x for name, x in plain.items() if name not in ignored}
        for name in nothing:
            several = _is_several(given[name])
            for place, x in enumerate(given[name] if several else [given[name]]):
                if type(x) is TracedArray and x.size:
                    numbers: Any = np.arange(1, x.size + 1).reshape(x.shape)
                    others: Any = nothing[name]
                    chosen = [*others[:place], numbers, *others[place + 1 :]] if several else numbers
                    found = np.asarray(function(**rest | nothing | {name: chosen}))
                    touch_at(x, np.unravel_index(distinct(found[found > 0]) - 1, x.shape), READ)
        return True

    return effect


def _is_several(value: Any) -> bool:
    return type(value) in (list, tuple)


def _where(condition: Any, x: Any = 0, y: Any = 0) -> Any:
    return np.where(condition, x, y)


def _full_like(given: Arguments, plain: Arguments) -> bool:
    read(given.get("fill_value"))
    return True


def _put(given: Arguments, plain: Arguments) -> bool:
    array, values = plain["a"], np.asarray(plain["v"])
    indices = np.asarray(plain["ind"]).reshape(-1)
    read(given["ind"])
    if not indices.size or not values.size:
        return True
    _read_first(given["v"], values, indices.size)
    if type(given["a"]) is TracedArray:
        at = _positions(indices, array.size, plain.get("mode", "raise"))
        touch_at(given["a"], np.unravel_index(at, array.shape), WRITE, plain["v"])
    return True


def _read_first(given: Any, values: Any, count: int) -> None:
    """Record that the first values are read, one after the other."""
    if type(given) is TracedArray:
        touch_at(given, np.unravel_index(np.arange(min(count, values.size)), values.shape), READ)
    else:
        read(given)


def _place(given: Arguments, plain: Arguments) -> bool:
    read(given["mask"])
    mask = np.asarray(plain["mask"], bool).reshape(plain["arr"].shape)
    if mask.any():
        _read_first(given["vals"], np.asarray(plain["vals"]), int(mask.sum()))
        touch_at(given["arr"], mask, WRITE, plain["vals"])
    return True


def _putmask(given: Arguments, plain: Arguments) -> bool:
    read(given["mask"])
    mask, values = np.asarray(plain["mask"], bool).reshape(plain["a"].shape), np.asarray(plain["values"])
    if mask.any() and values.size:
        if type(given["values"]) is TracedArray:
            used = np.unique(np.flatnonzero(mask) % values.size)
            touch_at(given["values"], np.unravel_index(used, values.shape), READ)
        else:
            read(given["values"])
        touch_at(given["a"], mask, WRITE, plain["values"])
    return True


def _copyto(given: Arguments, plain: Arguments) -> bool:
    where = plain.get("where", True)
    if where is True:
        if np.size(plain["dst"]):
            read(given["src"])
        touch(given["dst"], WRITE, plain["src"])
        return True
    read(given["where"])
    mask = np.broadcast_to(np.asarray(where, bool), plain["dst"].shape)
    src = given["src"]
    if type(src) is TracedArray and src.ndim > mask.ndim:  # leading axes of length 1
        src = src.reshape(src.shape[-mask.ndim :] if mask.ndim else ())
    touch_where(src, mask, READ)
    touch_at(given["dst"], mask, WRITE, plain["src"])
    return True


EFFECTS: dict[str, Callable[[Arguments, Arguments], bool]] = {
    "choose": _selecting(np.choose, "choices"), "compress": _selecting(np.compress, "a"),
    "copyto": _copyto, "full_like": _full_like, "place": _place, "put": _put, "putmask": _putmask,
    "select": _selecting(np.select, "choicelist", "default"), "take": _take,
    "trace": _selecting(np.diagonal, "a", ignored=("out", "dtype")), "where": _selecting(_where, "x", "y"),
}  # fmt: skip
"""By name of the function."""


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
IN_PLACE = frozenset({
    "median", "nanmedian", "nanpercentile", "nanquantile", "percentile", "quantile",
})  # fmt: skip
"""Reorder their argument with ``overwrite_input=True``."""
_POSITIONS = {
    "where": ("condition", "x", "y"),
    "putmask": ("a", "mask", "values"),
    "copyto": ("dst", "src", "casting", "where"),
    "dot": ("a", "b", "out"),
    "concatenate": ("arrays", "axis", "out"),
}
"""Of functions in C, whose arguments some versions of numpy hide."""
_PRINTED = frozenset({"array2string", "array_repr", "array_str"})


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
    if name in _PRINTED:
        printed = given["arr" if "arr" in given else "a"]
        read_printed(printed, given.get("threshold"), given.get("edgeitems"))
        return
    effect = EFFECTS.get(name)
    if effect is not None and effect(given, {key: plain_value(x) for key, x in given.items()}):
        return
    results = list(arrays_in(found)) if given.get("out") is None else []
    in_place = name in IN_PLACE and given.get("overwrite_input")
    for x in traced_in(inputs):
        if name in READ_AND_VIEW or not any(np.may_share_memory(result, x) for result in results):
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
