"""Layout: which bytes an array touches, and dtypes as plain data; nothing of it is trusted on receipt."""

from __future__ import annotations

import hashlib
import operator
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from nbparallel.errors import InvalidHandleError, ObjectArrayError, with_article
from nbparallel.sharing.tensors import array_at, describe_extension, rebuild_extension
from nbparallel.wire.name_updates import ArrayHandle
from nbparallel.wire.segments import is_segment_id, is_use

Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
MAX_DIMENSIONS = 64
"""numpy's own limit (32 before numpy 2; it checks again)."""
_DIGEST_NBYTES = 8
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
def describe_dtype(dtype: np.dtype[Any]) -> str | bytes:
    """Return a dtype for another process: its name; one with fields as its pickle, behind a digest of that.

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
    form: str | bytes = describe_extension(dtype) or dtype.str
    if dtype.names is not None:
        pickled = pickle.dumps(dtype, 5)
        form = _digest(pickled) + pickled
    try:
        if rebuild_dtype(form) == dtype:
            return form
    except InvalidHandleError:
        pass  # numpy itself does not know it by its name
    raise ObjectArrayError(f"dtype {dtype!r} cannot be described to another process: use a numpy dtype")


def _digest(pickled: bytes) -> bytes:
    return hashlib.blake2b(pickled, digest_size=_DIGEST_NBYTES).digest()


def rebuild_dtype(form: Any) -> np.dtype[Any]:
    """Return the dtype that `describe_dtype` described.

    Raises
    ------
    InvalidHandleError
        `form` is anything else.
    """
    if type(form) is str:
        return _rebuild_simple(form)
    if type(form) is bytes and _digest(form[_DIGEST_NBYTES:]) == form[:_DIGEST_NBYTES]:
        # from a process of this session, as the pickle in which handles travel
        dtype: np.dtype[Any] = pickle.loads(form[_DIGEST_NBYTES:])
        return dtype
    raise InvalidHandleError(f"no dtype of a shared array: {_cut(form)}")


@lru_cache(maxsize=256)
def _rebuild_simple(form: str) -> np.dtype[Any]:
    if not _SIMPLE.fullmatch(form):
        if (extension := rebuild_extension(form)) is None:
            raise InvalidHandleError(f"no dtype of a shared array: {form[:80]!r}")
        return extension
    try:
        dtype: np.dtype[Any] = np.dtype(form)
    except (TypeError, ValueError, OverflowError, MemoryError, SyntaxError) as error:
        raise InvalidHandleError(f"no dtype of a shared array: {error}") from error
    if dtype.hasobject or dtype.str != form:  # numpy 1 counts in 32 bits: <U9999999999 is <U336323583
        raise InvalidHandleError(f"no dtype of a shared array: {dtype}")
    return dtype


def check_handle(handle: ArrayHandle) -> np.dtype[Any]:
    """Return a handle's dtype after checking every field of it, with exact arithmetic.

    Raises
    ------
    InvalidHandleError
        A field is of the wrong type or range, or the array would not fit inside the segment.
    """
    if type(handle) is not ArrayHandle:
        raise InvalidHandleError(f"not a handle of a shared array: {type(handle).__name__}")
    segment, memory = handle.segment, handle.memory
    layout: list[Any] = [*handle[1:-1]]
    if type(segment) is not int or type(memory) is not int or not 0 <= memory < _WORD:
        raise InvalidHandleError(f"a handle's segment or memory is damaged: {_cut((segment, memory))}")
    if not is_segment_id(segment):
        raise InvalidHandleError(f"no segment has the id {_cut(segment)}")
    if memory and not is_use(segment, memory):
        raise InvalidHandleError(f"segment {segment:#x} is no use of memory {memory:#x}")
    nbytes, offset, shape, strides, form, writable, strategy = layout
    if [*map(type, layout)] in _REMEMBERED and {*map(type, shape), *map(type, strides)} <= _INTEGERS:
        return _check_layout(nbytes, offset, shape, strides, form, writable, strategy)
    # A cache takes True for 1, and what is damaged need not have a hash.
    return _check_layout.__wrapped__(nbytes, offset, shape, strides, form, writable, strategy)


_REMEMBERED = [[int, int, tuple, tuple, kind, bool, str] for kind in (str, bytes)]
"""Types of the fields between segment and memory."""
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
        content = array_at(array, array.ctypes.data + low, (high - low,), writable=False).data
        return CopyLayout(high - low, -low, array.strides, content)
    return CopyLayout(array.nbytes, 0, _compact_strides(array), None)


def _compact_strides(array: AnyArray) -> tuple[int, ...]:
    """Return the strides of a dense array whose axes are ordered in memory as `array`'s are."""
    axes = sorted(range(array.ndim), key=lambda axis: (abs(array.strides[axis]), -axis))
    strides = [0] * array.ndim
    step = array.itemsize
    for axis in axes:
        strides[axis] = step
        step *= array.shape[axis]
    return tuple(strides)
