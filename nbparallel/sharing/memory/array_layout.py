"""Layout: which bytes an array touches, and dtypes as plain data; nothing of it is trusted on receipt."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from nbparallel.errors import InvalidHandleError, ObjectArrayError, with_article
from nbparallel.sharing.tensors import describe_extension, rebuild_extension
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.segments import is_segment_id, is_use

Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
MAX_DIMENSIONS = 64
"""numpy's own limit (32 before numpy 2; it checks again)."""
MAX_FIELDS = 4096
"""Fields of a structured dtype, nested ones included: more is damage."""
MAX_DEPTH = 16
"""Structures in structures."""
_WORD = 1 << 63
"""Every size, offset and stride fits a signed 64-bit word."""
_SIMPLE = re.compile(
    r"[<>|](?:[biufcSUV][0-9]{1,10}|[mM]8(?:\[[0-9]{0,10}(?:generic|Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
"""What ``dtype.str`` of a dtype without objects and fields looks like."""


def extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the first byte and one past the last, relative to the element with all indices 0.

    >>> extent((3, 2), (8, -4), 4)
    (-4, 20)
    """
    low, high = 0, itemsize
    for count, stride in zip(shape, strides, strict=True):
        if count == 0:
            return 0, 0
        if stride < 0:
            low += (count - 1) * stride
        else:
            high += (count - 1) * stride
    return low, high


@lru_cache(maxsize=256)
def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as plain data, in the form of `numpy.lib.format.dtype_to_descr`.

    Fields that overlap, are out of order or aligned, which that form cannot say, become the dictionary that
    `numpy.dtype` takes.

    Raises
    ------
    ObjectArrayError
        Elements are Python objects, or of a type that cannot be described.
    """
    if dtype.hasobject:
        raise ObjectArrayError(
            f"an array of dtype {dtype} holds references to Python objects, which mean nothing in another "
            "process: use a numeric dtype or fixed-width strings, or send a copy"
        )
    try:
        form: Any = describe_extension(dtype) or (dtype.str if dtype.names is None else dtype.descr)
    except ValueError:
        form = None
    if form is None or (dtype.names is not None and _is_aligned(dtype)):
        form = _as_dictionary(dtype)
    try:
        same = rebuild_dtype(form) == dtype
    except InvalidHandleError:
        same = False
    if not same:
        raise ObjectArrayError(f"dtype {dtype!r} cannot be described to another process: use a numpy dtype")
    return form


def _is_aligned(dtype: np.dtype[Any]) -> bool:
    """Return whether a structure, or one inside of it, lies where a C compiler puts it: equality is blind."""
    fields: Any = dtype.fields or {}
    return dtype.isalignedstruct or any(_is_aligned(field[0].base) for field in fields.values())


def _as_dictionary(dtype: np.dtype[Any]) -> dict[str, Any]:
    names = dtype.names or ()
    known: Any = dtype.fields
    fields = [known[name] for name in names]
    form: dict[str, Any] = {
        "names": list(names),
        "formats": [_field_format(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }
    if dtype.isalignedstruct:
        form["aligned"] = True
    if any(len(field) > 2 for field in fields):
        form["titles"] = [field[2] if len(field) > 2 else None for field in fields]
    return form


def _field_format(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return describe_dtype(base), shape
    return describe_dtype(dtype)


def rebuild_dtype(form: Any) -> np.dtype[Any]:
    """Return the dtype that `describe_dtype` described.

    Raises
    ------
    InvalidHandleError
        `form` is anything else.
    """
    return _rebuild_simple(form) if type(form) is str else _rebuild_fields(form)


@lru_cache(maxsize=256)
def _rebuild_simple(form: str) -> np.dtype[Any]:
    if _SIMPLE.fullmatch(form):
        return _built(form)
    extension = rebuild_extension(form)
    if extension is None:
        raise InvalidHandleError(f"no dtype of a shared array: {form[:80]!r}")
    return extension


def _rebuild_fields(form: Any) -> np.dtype[Any]:
    _check_form(form, 0, [MAX_FIELDS])
    try:
        dtype = _from_form(form)
    except _REFUSALS as error:
        raise InvalidHandleError(f"no dtype of a shared array: {error}") from error
    if dtype.hasobject or not 0 <= dtype.itemsize < _WORD:
        raise InvalidHandleError(f"no dtype of a shared array: {dtype}")
    return dtype


_REFUSALS = (TypeError, ValueError, KeyError, OverflowError, MemoryError, SyntaxError, RecursionError)
"""What numpy raises on odd descriptions."""


def _built(form: str) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(form)
    except _REFUSALS as error:
        raise InvalidHandleError(f"no dtype of a shared array: {error}") from error
    if dtype.hasobject or dtype.str != form:  # numpy 1 counts in 32 bits: <U9999999999 is <U336323583
        raise InvalidHandleError(f"no dtype of a shared array: {dtype}")
    return dtype


def _from_form(form: Any) -> np.dtype[Any]:
    if type(form) is dict:
        keywords: Any = {**form, "formats": [_from_field(item) for item in form["formats"]]}
        dtype: np.dtype[Any] = np.dtype(keywords)
    else:
        dtype = npy_format.descr_to_dtype(form)
    return dtype


def _from_field(form: Any) -> np.dtype[Any]:
    if type(form) is tuple:
        return np.dtype((_from_form(form[0]), form[1]))
    return _from_form(form)


def _check_form(form: Any, depth: int, left: list[int]) -> None:
    """Raise unless `form` follows the grammar: nothing else may reach numpy's dtype parser."""
    left[0] -= 1
    if depth > MAX_DEPTH or left[0] < 0:
        raise InvalidHandleError("a dtype is nested too deeply or has too many fields")
    if type(form) is str:
        if not _SIMPLE.fullmatch(form):
            raise InvalidHandleError(f"no dtype of a shared array: {form[:80]!r}")
        _built(form)
    elif type(form) is list:
        for item in form:
            if type(item) is not tuple or len(item) not in (2, 3) or not _is_name(item[0]):
                raise InvalidHandleError(f"no field of a dtype: {_cut(item)}")
            _check_form(item[1], depth + 1, left)
            if len(item) == 3:
                _check_subshape(item[2])
    elif type(form) is dict:
        _check_dictionary(form, depth, left)
    else:
        raise InvalidHandleError(f"no dtype of a shared array: {_cut(form)}")


def _check_dictionary(form: dict[Any, Any], depth: int, left: list[int]) -> None:
    if not {"names", "formats", "offsets", "itemsize"} <= form.keys() <= _KEYS:
        raise InvalidHandleError("a dtype's dictionary has other keys than it should")
    if form.get("aligned", True) is not True or any(
        type(form[key]) is not list for key in form.keys() - _PLAIN
    ):
        raise InvalidHandleError("a dtype's dictionary holds no lists")
    if not _is_size(form["itemsize"]) or not all(map(_is_size, form["offsets"])):
        raise InvalidHandleError("a dtype's size or offset is no size")
    if not all(type(name) is str for name in form["names"]) or not all(
        title is None or type(title) is str for title in form.get("titles", ())
    ):
        raise InvalidHandleError("a dtype's field has no name")
    for item in form["formats"]:
        if type(item) is tuple:
            if len(item) != 2:
                raise InvalidHandleError("a dtype's field is no array")
            _check_subshape(item[1])
            item = item[0]
        _check_form(item, depth + 1, left)


_KEYS = {"names", "formats", "offsets", "itemsize", "titles", "aligned"}
_PLAIN = {"itemsize", "aligned"}


def _is_name(name: Any) -> bool:
    if type(name) is tuple:
        return len(name) == 2 and all(type(part) is str for part in name)
    return type(name) is str


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _check_subshape(shape: Any) -> None:
    if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise InvalidHandleError("a dtype's field has no valid shape")


def check_handle(handle: ArrayHandle) -> np.dtype[Any]:
    """Return a handle's dtype after checking every field of it, with exact arithmetic.

    Raises
    ------
    InvalidHandleError
        A field is of the wrong type or range, or the array would not fit inside the segment.
    """
    if type(handle) is not ArrayHandle:
        raise InvalidHandleError(f"not a handle of a shared array: {type(handle).__name__}")
    segment, *layout, memory = handle
    if type(segment) is not int or type(memory) is not int or not 0 <= memory < _WORD:
        raise InvalidHandleError(f"a handle's segment or memory is damaged: {_cut((segment, memory))}")
    if not is_segment_id(segment):
        raise InvalidHandleError(f"no segment has the id {_cut(segment)}")
    if memory and not is_use(segment, memory):
        raise InvalidHandleError(f"segment {segment:#x} is no use of memory {memory:#x}")
    nbytes, offset, shape, strides, form, writable, strategy = layout
    if [*map(type, layout)] == _REMEMBERED and {*map(type, shape), *map(type, strides)} <= _INTEGERS:
        return _check_layout(nbytes, offset, shape, strides, form, writable, strategy)
    # A cache takes True for 1, and what is nested very deeply crashes Python when it is hashed.
    return _check_layout.__wrapped__(nbytes, offset, shape, strides, form, writable, strategy)


_REMEMBERED = [int, int, tuple, tuple, str, bool, str]
"""Types of the fields between segment and memory, but for structured dtypes."""
_INTEGERS = {int}


@lru_cache(maxsize=256)
def _check_layout(
    nbytes: Any, offset: Any, shape: Any, strides: Any, form: Any, writable: Any, strategy: Any
) -> np.dtype[Any]:
    """Check the fields that are the same for every use of a memory, as a rule."""
    if not all(type(number) is int and 0 <= number < _WORD for number in (nbytes, offset)):
        raise InvalidHandleError(f"a handle's size or offset is damaged: {_cut((nbytes, offset))}")
    if type(strategy) is not str or not strategy.isidentifier():
        raise InvalidHandleError(f"a handle's strategy is damaged: {_cut(strategy)}")
    if type(shape) is not tuple or type(strides) is not tuple or type(writable) is not bool:
        raise InvalidHandleError("a handle's shape, strides or right is of the wrong type")
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise InvalidHandleError(f"a handle has {len(shape)} dimensions and {len(strides)} strides")
    for count, stride in zip(shape, strides, strict=True):
        if type(count) is not int or type(stride) is not int or not 0 <= count < _WORD:
            raise InvalidHandleError(f"a handle's shape is damaged: {_cut((count, stride))}")
        if not -_WORD <= stride < _WORD:
            raise InvalidHandleError(f"a handle's stride is damaged: {_cut(stride)}")
    dtype = rebuild_dtype(form)
    low, high = extent(shape, strides, dtype.itemsize)
    low, high = low + offset, high + offset
    if low < 0 or high > nbytes:
        raise InvalidHandleError(
            f"a handle points to bytes {_cut(low)} to {_cut(high)} of a segment of {_cut(nbytes)} bytes"
        )
    return dtype


def span(handle: ArrayHandle) -> tuple[int, int]:
    """Return the first byte of a handle's array in its segment, and one past the last."""
    low, high = extent(handle.shape, handle.strides, rebuild_dtype(handle.dtype).itemsize)
    return handle.offset + low, handle.offset + high


def _cut(value: object) -> str:
    """Show a damaged value, but not a megabyte of it."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"{with_article(type(value).__name__)} too long to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def sizes_of(shape: Shape) -> tuple[int, ...]:
    """Return a shape as numpy takes it, as a tuple; errors as numpy's."""
    if type(shape) is int and shape >= 0:
        return (shape,)
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    if any(size < 0 for size in sizes):
        raise ValueError(f"negative dimensions are not allowed: {sizes}")
    return sizes


AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CopyLayout:
    """Size and strides of the copy of an array in its segment."""

    nbytes: int
    """Bytes that it takes."""
    offset: int
    """Offset of its element with all indices 0."""
    strides: tuple[int, ...]
    """Its strides in bytes."""
    content: memoryview | None
    """The bytes to copy as they are, or None if the elements have to be copied one by one."""


def plan_copy(array: AnyArray) -> CopyLayout:
    """Decide how to lay out a copy of `array`.

    If the bytes from its first to its last are no more than its elements need (it is dense in any order,
    reversed, broadcast, or windows over one row), they are copied as they are and all strides stay.
    Otherwise the gaps are dropped; the order of the axes stays.
    """
    low, high = extent(array.shape, array.strides, array.itemsize)
    if high - low <= array.nbytes:
        return CopyLayout(high - low, -low, array.strides, np.asarray(_Bytes(array, low, high)).data)
    return CopyLayout(array.nbytes, 0, _compact_strides(array), None)


class _Bytes:
    """The bytes under an array, whatever its dtype and strides (numpy's array interface)."""

    def __init__(self, array: AnyArray, low: int, high: int) -> None:
        self.keep = array
        self.__array_interface__ = {
            "data": (array.ctypes.data + low, True),
            "shape": (high - low,),
            "typestr": "|u1",
            "version": 3,
        }


def _compact_strides(array: AnyArray) -> tuple[int, ...]:
    """Return the strides of a dense array whose axes are ordered in memory as `array`'s are."""
    axes = sorted(range(array.ndim), key=lambda axis: (abs(array.strides[axis]), -axis))
    strides = [0] * array.ndim
    step = array.itemsize
    for axis in axes:
        strides[axis] = step
        step *= array.shape[axis]
    return tuple(strides)
