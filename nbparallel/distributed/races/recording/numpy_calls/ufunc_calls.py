"""Calls of ufuncs with traced arrays: what they read, and what their results are written to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.races.access_log import READ, WRITE
from nbparallel.distributed.races.recording.access_recorder import offsets_at
from nbparallel.distributed.races.recording.traced_array import (
    TracedArray,
    plain,
    plain_value,
    read,
    recorder,
    touch,
    touch_at,
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
