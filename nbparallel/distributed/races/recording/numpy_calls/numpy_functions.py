"""Functions of numpy that traced arrays are passed to: what each reads and writes.

A function whose result is a view of an argument has not read it.  Any other reads all arrays that it is
passed, `out` is written, and the tables name those that read less, or write into an argument.
`tests/distributed/races/recording/test_access_paths.py` compares the tables with what numpy has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_log import WRITE
from nbparallel.distributed.races.recording.numpy_calls.function_effects import EFFECTS
from nbparallel.distributed.races.recording.numpy_calls.printed_parts import read_printed
from nbparallel.distributed.races.recording.traced_array import (
    TracedArray,
    TracedFields,
    plain_value,
    read,
    recorder,
    seen,
    touch,
    trace,
)

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
    found = call(*map(plain_arguments, args), **{key: plain_arguments(x) for key, x in options.items()})
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
    if effect is not None and effect(given, {key: plain_arguments(x) for key, x in given.items()}):
        return
    results = list(arrays_of(found)) if given.get("out") is None else []
    in_place = name in IN_PLACE and given.get("overwrite_input")
    for x in traced_in(inputs):
        if name in READ_AND_VIEW or not any(np.may_share_memory(result, x) for result in results):
            read(x)
        if in_place:
            touch(x, WRITE)


def plain_arguments(value: Any) -> Any:
    """Return an argument with plain arrays, in nested lists, tuples and dicts too."""
    if type(value) is dict:
        return {name: plain_arguments(part) for name, part in value.items()}
    if type(value) is TracedFields:
        return seen(value)
    return plain_value(value)


def traced_in(value: Any) -> Iterator[TracedArray]:
    """Yield the traced arrays in nested lists, tuples and dicts."""
    if type(value) is TracedArray:
        yield value
    elif type(value) in (list, tuple):
        for part in value:
            yield from traced_in(part)
    elif type(value) is dict:
        yield from traced_in(list(value.values()))


def arrays_of(value: Any) -> Iterator[Any]:
    """Yield the arrays in nested lists and tuples."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from arrays_of(part)


def retraced(found: Any, inputs: Iterable[TracedArray]) -> Any:
    """Return a result in which views of traced arguments are traced."""
    kind = type(found)
    if kind is np.ndarray:
        return trace(found) if any(np.may_share_memory(found, x) for x in inputs) else found
    if isinstance(found, list | tuple):
        kept = list(inputs)
        parts = [retraced(part, kept) for part in found]
        return kind(*parts) if hasattr(found, "_fields") else kind(parts)
    return found


TracedArray.__array_function__ = _array_function  # type: ignore[method-assign]
