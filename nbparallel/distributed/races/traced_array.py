"""Traced arrays: shared arrays as the code of a checked cell sees them, so that each access is recorded.

::

    x[2:5]                a view, and no access: traced as well
    x[3], x[[1, 4]]       __getitem__      read
    x[2:5] = 1            __setitem__      written
    x += y, np.sin(x)     __array_ufunc__ (`ufunc_calls`)            read, and `out` written
    np.sort(x)            __array_function__ (`numpy_functions`)
    x.sort(), x.tolist()  methods of C that go through none of these (`numpy_functions`)
    np.asarray(x)         doors: functions that look at the memory itself (`checked_cell`)
    private[:] = x[2:5]   numpy asks nothing: the cell's code does (`checked_cell`)

The class has no attributes of its own, so that views cost little; outside a checked cell an object of it
that was kept behaves as a plain array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import EllipsisType, NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.races.access_log import READ, WRITE
from nbparallel.distributed.races.access_recorder import AccessRecorder, offsets_at, one_value

AnyArray = npt.NDArray[Any]
_get: Any = np.ndarray.__getitem__
_set: Any = np.ndarray.__setitem__
_view: Any = np.ndarray.view
_base_of: Any = np.ndarray.base.__get__
_SHAPING = frozenset({slice, NoneType, EllipsisType})
_BASIC = _SHAPING | {int, np.int64, np.int32, np.uint64, np.uint32}
"""Types of which an index makes a view."""
_Place = tuple[int, int]
_CONTAINERS = (list, tuple, dict)
MAX_DEPTH = 8
"""Containers in containers; deeper ones, and those that hold themselves, are pickled as they are."""
Replacements = Mapping[type, Callable[[Any], Any]]
_recorder: AccessRecorder | None = None
_serial = 0


@contextmanager
def recording(recorder: AccessRecorder) -> Iterator[None]:
    """Have traced arrays record what is done with them while the block runs."""
    global _recorder, _serial
    _recorder, _serial = recorder, _serial + 1
    try:
        yield
    finally:
        _recorder = None


def recorder() -> AccessRecorder | None:
    """Return what records now; None outside of a checked cell."""
    return _recorder


class TracedArray(np.ndarray[Any, Any]):
    """An array whose accesses are recorded; see the module."""

    _place: tuple[int, _Place | None, int]

    def __getitem__(self, key: Any) -> Any:
        """Return an element or a part; a part of slices is a view, and no access."""
        if type(key) is slice:  # first: views are common
            return _get(self, key)
        for part in key if type(key) is tuple else (key,):
            if type(part) not in _BASIC:
                return _get_other(self, key)
        found = _get(self, key)
        if type(found) is not TracedArray and _recorder is not None:
            place = place_of_part(self, key)
            if place is not None:
                _recorder.element(place, self.itemsize, READ)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        """Assign to an element or a part."""
        if _recorder is None:
            _set(self, key, value)
            return None
        if type(value) not in _SCALARS:
            value = seen(value)
        for part in key if type(key) is tuple else (key,):
            if type(part) not in _BASIC:
                return _set_other(self, key, value)
        _set(self, key, value)
        taken = _get(self, key)
        if type(taken) is not TracedArray:
            if (place := place_of_part(self, key)) is not None:
                _recorder.element(place, self.itemsize, WRITE, one_value(value))
        elif taken.size and (place := place_of_part(self, key)) is not None:
            _recorder.touch_at(place, taken, WRITE, value)  # as `touch` does, which would ask where it lies
        return None


_SCALARS = frozenset({int, float, complex, bool, str, bytes, np.float64, np.int64, np.float32, np.bool_})


def _get_other(array: TracedArray, key: Any) -> Any:
    """Return what another index takes: an array of indices, a mask, names of fields, …."""
    key = seen(key)
    found = _get(array, key)
    if type(found) is TracedArray and np.may_share_memory(found, array):
        return found  # names of fields, or whole numbers of another type
    touch_at(array, key, READ)
    return plain(found) if type(found) is TracedArray else found


def _set_other(array: TracedArray, key: Any, value: Any) -> None:
    key = seen(key)
    _set(array, key, value)
    part = _get(array, key)
    if type(part) is TracedArray and np.may_share_memory(part, array):
        touch(part, WRITE, value)
    else:
        touch_at(array, key, WRITE, value)


def touch_at(array: Any, key: Any, kind: int, value: Any = None) -> None:
    """Record that what an index takes is touched, if the array is traced."""
    if _recorder is not None and type(array) is TracedArray:
        array = plain(array)
        _recorder.elements(array, offsets_at(array, key), kind, value)


# -- where it lies ---------------------------------------------------------------------------------------


def place_of(array: TracedArray) -> _Place | None:
    """Return segment and offset; kept, since loops ask for it, and for views of one array."""
    try:
        serial, place, address = array._place
        if serial == _serial:
            return place
    except AttributeError:
        pass
    base, here = _base_of(array), plain(array).ctypes.data
    if type(base) is TracedArray:
        place_of(base)
        _, place, address = base._place
        if place is not None:
            place = place[0], place[1] + here - address
    else:
        assert _recorder is not None
        place = _recorder.locate(plain(array))
    array._place = _serial, place, here
    return place


def place_of_part(array: TracedArray, key: Any) -> _Place | None:
    """Return segment and offset of what an index takes: faster computed than asked for."""
    try:
        serial, place, _ = array._place
        if serial != _serial:
            place = place_of(array)
    except AttributeError:
        place = place_of(array)
    if place is None:
        return None
    segment, offset = place
    axis, shape, strides = 0, array.shape, array.strides
    parts = key if type(key) is tuple else (key,)
    for at in parts:
        if type(at) not in _SHAPING:  # first: loops take elements
            offset += (int(at) if at >= 0 else int(at) + shape[axis]) * strides[axis]
        elif at is Ellipsis:
            axis += array.ndim - sum(part is not None and part is not Ellipsis for part in parts)
            continue
        elif at is None:
            continue
        elif at.start is not None or at.step is not None:
            offset += at.indices(shape[axis])[0] * strides[axis]
        axis += 1
    return segment, offset


# -- arguments -------------------------------------------------------------------------------------------


def touch(x: Any, kind: int, value: Any = None) -> None:
    """Record that an argument is touched, if it is traced."""
    if type(x) is TracedArray and _recorder is not None and x.size:
        place = place_of(x)
        if place is not None:
            _recorder.touch_at(place, x, kind, value)


def parts_of(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield what is in nested lists, tuples and dicts."""
    if isinstance(value, list | tuple | dict) and depth < MAX_DEPTH:
        for part in value.values() if isinstance(value, dict) else value:
            yield from parts_of(part, depth + 1)
    else:
        yield value


def replaced(value: Any, replacements: Replacements, depth: int = 0) -> Any:
    """Return a value with other parts, by their types; it is the same object if none is replaced."""
    kind = type(value)
    if replace := replacements.get(kind):
        return replace(value)
    if kind not in _CONTAINERS or depth > MAX_DEPTH:
        return value
    parts = list(value.values()) if kind is dict else value
    if not any(type(part) in replacements or type(part) in _CONTAINERS for part in parts):
        return value
    found = [replaced(part, replacements, depth + 1) for part in parts]
    if all(one is other for one, other in zip(parts, found, strict=True)):
        return value
    return dict(zip(value, found, strict=True)) if kind is dict else kind(found)


def arrays_in(value: Any) -> Iterator[Any]:
    """Yield the arrays in nested lists, tuples and dicts."""
    return (part for part in parts_of(value) if isinstance(part, np.ndarray))


def traced_in(value: Any) -> Iterator[TracedArray]:
    """Yield the traced arrays in nested lists, tuples and dicts."""
    return (part for part in parts_of(value) if type(part) is TracedArray)


def read(x: Any) -> None:
    """Record that traced arrays are read."""
    for array in traced_in(x):
        touch(array, READ)


def seen(value: Any) -> Any:
    """Return a value with plain arrays, in indices too; record that the traced ones are read."""
    return replaced(value, _SEEN)


def trace(array: AnyArray) -> TracedArray:
    """Return the same memory as a traced array."""
    traced: TracedArray = _view(array, TracedArray)
    return traced


def plain(array: AnyArray) -> AnyArray:
    """Return the same memory as a plain array; no access."""
    found: AnyArray = _view(array, np.ndarray)
    return found


def plain_value(value: Any) -> Any:
    """Return a value with plain arrays."""
    return replaced(value, _PLAIN)


def _seen_array(array: TracedArray) -> AnyArray:
    touch(array, READ)
    return plain(array)


_SEEN: Replacements = {
    TracedArray: _seen_array,
    slice: lambda x: slice(seen(x.start), seen(x.stop), seen(x.step)),
}
_PLAIN: Replacements = {TracedArray: plain}
