"""Shared arrays as the operations use them: where an array lies, and other ranks' arrays, attached."""

from __future__ import annotations

import marshal
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from nbparallel.errors import ForkedRankError, InternalError, ReadOnlyArrayError
from nbparallel.sharing.lifecycle.segment import Location
from nbparallel.sharing.store import Store, current_store
from nbparallel.sharing.tensors import as_array, is_tensor, tensor_of
from nbparallel.wire.name_updates import ArrayHandle

AnyArray: TypeAlias = npt.NDArray[Any]
MAX_KNOWN = 64
"""How many arrays' spans are remembered; another look-up costs about a microsecond."""
MAX_ATTACHED_NBYTES = 512 << 20
"""Bytes of other ranks' arrays that stay attached until the cell ends, since each attach costs page faults:
an array that its owner deletes lives as long."""

FEW_PAIRS = 64
"""Up to which pairs of arrays are compared one by one: quicker than to sort them."""


K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dictionary that forgets all that it holds when it would hold more than so many."""

    def __init__(self, most: int = 1024) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


def as_plain_array(x: Any) -> AnyArray | None:
    """Return `x` as the plain array whose bytes can travel, None if it has to be pickled.

    A tensor as the array over the same memory; `TypeError` if there is none, with what to do.
    """
    if type(x) is np.ndarray:
        return None if x.dtype.hasobject else x
    if isinstance(x, np.memmap | np.matrix):
        return x.view(np.ndarray)
    return as_array(x)


def as_operand(x: Any) -> AnyArray | None:
    """Return `x` as the plain array that is computed with or filled, None if it is none: a number, say."""
    if isinstance(x, np.ndarray):
        return None if isinstance(x, np.ma.MaskedArray) else x.view(np.ndarray)
    array = as_array(x)
    if array is not None and array.flags.writeable and is_mapped_read_only(array):
        array.flags.writeable = False
    return array


def is_mapped_read_only(array: AnyArray) -> bool:
    """Return whether writing to an array would end the rank; a tensor over that memory does not know it."""
    try:
        location = current_store().location(array)
    except ForkedRankError:  # of a forked child the operation itself says so
        return False
    return location is not None and not location.writable


def bounds(x: AnyArray) -> tuple[int, int]:
    """Return the address of the first byte of an array that has elements, and of the one behind its last."""
    start = stop = int(x.__array_interface__["data"][0])
    for count, stride in zip(x.shape, x.strides, strict=True):
        if stride < 0:
            start += (count - 1) * stride
        else:
            stop += (count - 1) * stride
    return start, stop + x.itemsize


def may_overlap(some: Sequence[AnyArray], others: Sequence[AnyArray]) -> bool:
    """Whether one array may share memory with one of the others, as `numpy.may_share_memory` means it."""
    if len(some) * len(others) <= FEW_PAIRS:
        return any(np.may_share_memory(x, y) for x in some for y in others)
    spans = [(*bounds(x), of) for of, arrays in enumerate((some, others)) for x in arrays if x.size]
    stops = [0, 0]
    for start, stop, of in sorted(spans):
        if start < stops[1 - of]:
            return True
        stops[of] = max(stops[of], stop)
    return False


def in_kind_of(x: Any, result: Any) -> Any:
    """Return a new array, or each of a tuple of them, as a tensor if `x` is one; anything else as it is."""
    if not is_tensor(x):
        return result
    if isinstance(result, tuple):
        return tuple(in_kind_of(x, part) for part in result)
    return tensor_of(result) if isinstance(result, np.ndarray) else result


def copied(x: Any) -> Any:
    """Return a copy of an array or a tensor; an object as it is."""
    if isinstance(x, np.ndarray):
        return x.copy()
    return x.detach().clone() if is_tensor(x) else x


def read_only(x: Any, message: str) -> ReadOnlyArrayError:
    """Return the error about an array that cannot be changed; it says how to copy what the user passed."""
    if isinstance(x, np.ndarray):
        return ReadOnlyArrayError(message)
    return ReadOnlyArrayError(message.replace("x.copy()", "x.clone()" if is_tensor(x) else "numpy.array(x)"))


def encode_handle(handle: ArrayHandle) -> bytes:
    """Return a handle as bytes for a slot or a ring."""
    return marshal.dumps(tuple(handle))


def packed_handle(store: Store, x: AnyArray, *, writable: bool) -> bytes:
    """Return the handle of an array in shared memory as bytes."""
    handle = store.handle(x, writable=writable)
    assert handle is not None, "the store's own arrays are shared"
    return encode_handle(handle)


def decode_handle(data: bytes | memoryview) -> ArrayHandle:
    """Rebuild a handle; the store validates it when it attaches."""
    return ArrayHandle(*marshal.loads(data))


class SharedSpan:
    """The part of a segment in which one array lies; `packed` is its handle once that was needed."""

    __slots__ = ("direct", "dtype", "packed", "reference", "segment", "start", "stop")

    def __init__(self, x: AnyArray, location: Location) -> None:
        self.reference = weakref.ref(x)
        self.dtype = x.dtype
        self.segment, self.start, self.stop = location.segment, location.start, location.stop
        self.direct: bool = x.flags.c_contiguous
        """Whether other ranks can work on its elements in their order."""
        self.packed: bytes | None = None


class SharedArrayLookup:
    """The spans of this rank's arrays, and other ranks' arrays that are attached.

    Parameters
    ----------
    attach : callable
        ``attach(handle, writable=…)``, returns another rank's array.

    Notes
    -----
    Nothing here keeps a user's array alive, and what was attached is released when the cell ends: a segment
    lives only as long as the arrays in it.
    """

    def __init__(self, store: Store, attach: Callable[..., AnyArray]) -> None:
        self.store, self._attach = store, attach
        self._spans: Cache[int, SharedSpan] = Cache(MAX_KNOWN)
        self._attached: dict[tuple[bytes, bool | None], AnyArray] = {}
        """By handle and right; None instead of the right: with its strides, not flat."""
        self._seen: Cache[bytes, bool] = Cache(MAX_KNOWN)
        self._attached_nbytes = 0

    def span_of(self, x: AnyArray) -> SharedSpan | None:
        """Return the span of `x`, None if its memory is private."""
        if x.base is None:
            return None  # it owns its memory, so it is numpy's
        span = self._spans.get(id(x))
        if span is not None and span.reference() is x and span.dtype is x.dtype:
            return span
        location = self.store.location(x)
        if location is None:
            return None
        span = self._spans[id(x)] = SharedSpan(x, location)
        return span

    def packed(self, x: AnyArray, span: SharedSpan) -> bytes:
        """Return the handle of `x` as bytes."""
        if span.packed is None:
            span.packed = packed_handle(self.store, x, writable=True)
        return span.packed

    def attach(self, packed: bytes, *, writable: bool) -> AnyArray:
        """Return another rank's array, flat; it stays attached until `forget`."""
        key = (packed, writable)
        array = self._attached.get(key)
        if array is None:
            array = self._attach(decode_handle(packed), writable=writable).reshape(-1)
            self._keep(key, array)
        return array

    def attach_view(self, packed: bytes | memoryview) -> AnyArray:
        """Return another rank's array with its strides, read-only; the second time it stays attached.

        So a program that sends views of ever new arrays does not keep their owners from reusing memory.
        """
        key = (bytes(packed), None)
        array = self._attached.get(key)
        if array is None:
            array = self._attach(decode_handle(key[0]), writable=False)
            if key[0] in self._seen:
                self._keep(key, array)
            self._seen[key[0]] = True
        return array

    def _keep(self, key: tuple[bytes, bool | None], array: AnyArray) -> None:
        if self._attached_nbytes + array.nbytes > MAX_ATTACHED_NBYTES:
            self._attached.clear()
            self._attached_nbytes = 0
        self._attached[key] = array
        self._attached_nbytes += array.nbytes

    def forget(self) -> None:
        """Release what was attached."""
        self._attached.clear()
        self._seen.clear()
        self._attached_nbytes = 0
        self._spans.clear()

    def close(self) -> None:
        """Release everything; nothing can be attached afterwards."""
        self.forget()
        self._attach = _refuse


def _refuse(*_: object, **__: object) -> AnyArray:
    raise InternalError("an array was to be attached after the communicator was closed")
