"""Effects of the functions of numpy that read a part of an array, or write into an argument.

Each takes the arguments by name, as they were passed and with plain arrays, and records them; False: it
reads them all, as any other function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_log import READ, WRITE
from nbparallel.distributed.races.recording.numpy_calls.ufunc_calls import touch_where
from nbparallel.distributed.races.recording.traced_array import TracedArray, read, touch, touch_at, trace

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


def _compress(given: Arguments, plain: Arguments) -> bool:
    if not {"a", "condition"} <= plain.keys():
        return False
    read(given["condition"])
    chosen = np.flatnonzero(np.asarray(plain["condition"]))
    return _take({**given, "indices": chosen}, {**plain, "indices": chosen, "mode": "raise"})


def _choose(given: Arguments, plain: Arguments) -> bool:
    read(given["a"])
    if type(given["choices"]) not in (list, tuple):
        read(given["choices"])
        return True
    choices, count = plain["choices"], len(plain["choices"])
    chosen = np.asarray(plain["a"])
    if plain.get("mode", "raise") in ("clip", 1):
        chosen = np.clip(chosen, 0, count - 1)
    shape = np.broadcast_shapes(chosen.shape, *(np.shape(x) for x in choices))
    chosen = np.broadcast_to(chosen % count, shape)
    for number, x in enumerate(given["choices"]):
        touch_where(x, chosen == number, READ)
    return True


def _where(given: Arguments, plain: Arguments) -> bool:
    read(given["condition"])
    if "x" not in given or "y" not in given:
        return True
    mask = np.asarray(plain["condition"], bool)
    mask = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, *(np.shape(plain[name]) for name in "xy")))
    touch_where(given["x"], mask, READ)
    touch_where(given["y"], ~mask, READ)
    return True


def _select(given: Arguments, plain: Arguments) -> bool:
    for x in given["condlist"]:
        read(x)
    default = given.get("default", 0)
    shape = np.broadcast_shapes(
        *(np.shape(x) for x in (*plain["condlist"], *plain["choicelist"], plain.get("default", 0)))
    )
    rest = np.ones(shape, bool)
    for condition, x in zip(plain["condlist"], given["choicelist"], strict=True):
        touch_where(x, rest & condition, READ)
        rest &= ~np.asarray(condition)
    touch_where(default, rest, READ)
    return True


def _trace(given: Arguments, plain: Arguments) -> bool:
    axes = plain.get("offset", 0), plain.get("axis1", 0), plain.get("axis2", 1)
    if type(given["a"]) is TracedArray:
        read(trace(plain["a"].diagonal(*axes)))
    return True


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
    "choose": _choose, "compress": _compress, "copyto": _copyto, "full_like": _full_like,
    "place": _place, "put": _put, "putmask": _putmask,
    "select": _select, "take": _take, "trace": _trace, "where": _where,
}  # fmt: skip
"""By name of the function."""
