"""What the operations know of shared memory: where an array lies, and other ranks' arrays, attached."""

from __future__ import annotations

import marshal
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nbparallel.errors import InternalError
from nbparallel.sharing.lifecycle.segment import Location
from nbparallel.sharing.store import Store
from nbparallel.wire.handles import ArrayHandle

AnyArray: TypeAlias = npt.NDArray[Any]
MAX_KNOWN = 64
"""Arrays whose place is remembered; the next one is looked up again, which costs about a microsecond."""
MAX_ATTACHED_NBYTES = 512 << 20
"""Of other ranks' arrays that stay attached until the cell ends (each attach costs page faults): what their
owners have dropped meanwhile lives as long."""


def as_plain_array(x: Any) -> AnyArray | None:
    """Return `x` as the plain array whose bytes can travel, None if it has to be pickled."""
    if type(x) is np.ndarray:
        return None if x.dtype.hasobject else x
    if isinstance(x, np.memmap | np.matrix):
        return x.view(np.ndarray)
    return None


def encode_handle(handle: ArrayHandle) -> bytes:
    """Return a handle as bytes for a slot or a ring."""
    return marshal.dumps(tuple(handle))


def decode_handle(data: bytes | memoryview) -> ArrayHandle:
    """Rebuild a handle; the store validates it when it attaches."""
    return ArrayHandle(*marshal.loads(data))


class SharedSpan:
    """Where one array lies; `packed` is its handle once somebody needed it."""

    __slots__ = ("direct", "dtype", "packed", "reference", "segment", "start", "stop")

    def __init__(self, x: AnyArray, location: Location) -> None:
        self.reference = weakref.ref(x)
        self.dtype = x.dtype
        self.segment, self.start, self.stop = location.segment, location.start, location.stop
        self.direct: bool = x.flags.c_contiguous
        """Whether other ranks can work on its elements in their order."""
        self.packed: bytes | None = None


class SharedArrayLookup:
    """Places of this rank's arrays, and other ranks' arrays as attached here.

    Parameters
    ----------
    attach : callable
        ``attach(handle, writable=…)``, returns another rank's array.

    Notes
    -----
    Nothing here keeps a user's array alive, and what was attached is let go when the cell ends: a segment
    lives only as long as somebody's array.
    """

    def __init__(self, store: Store, attach: Callable[..., AnyArray]) -> None:
        self.store, self._attach = store, attach
        self._places: dict[int, SharedSpan] = {}
        self._attached: OrderedDict[tuple[bytes, bool | None], AnyArray] = OrderedDict()
        """By handle and right; None instead of it: as they lie, not flat."""
        self._seen: set[bytes] = set()
        self._attached_nbytes = 0

    def place(self, x: AnyArray) -> SharedSpan | None:
        """Return where `x` lies, None if its memory is private."""
        if x.base is None:
            return None  # it owns its memory, so it is numpy's
        place = self._places.get(id(x))
        if place is not None and place.reference() is x and place.dtype is x.dtype:
            return place
        location = self.store.location(x)
        if location is None:
            return None
        if len(self._places) >= MAX_KNOWN:
            self._places.clear()
        place = self._places[id(x)] = SharedSpan(x, location)
        return place

    def packed(self, x: AnyArray, place: SharedSpan) -> bytes:
        """Return the handle of `x` as bytes."""
        if place.packed is None:
            handle = self.store.handle(x, writable=True)
            assert handle is not None, "a place is only known of shared arrays"
            place.packed = encode_handle(handle)
        return place.packed

    def packed_flat(self, x: AnyArray) -> bytes:
        """Return the handle of a shared flat array as bytes."""
        place = self.place(x)
        assert place is not None, "only shared arrays have handles"
        return self.packed(x, place)

    def attach(self, packed: bytes, *, writable: bool) -> AnyArray:
        """Return another rank's array, flat; it stays attached until `forget`."""
        key = (packed, writable)
        array = self._attached.get(key)
        if array is None:
            array = self._attach(decode_handle(packed), writable=writable).reshape(-1)
            self._keep(key, array)
        else:
            self._attached.move_to_end(key)
        return array

    def look(self, packed: bytes | memoryview) -> AnyArray:
        """Return another rank's array as it lies, read-only; if it comes again, it stays attached.

        A program that shows new arrays all the time does not keep their owners from using memory again.
        """
        key = (bytes(packed), None)
        array = self._attached.get(key)
        if array is not None:
            self._attached.move_to_end(key)
            return array
        array = self._attach(decode_handle(key[0]), writable=False)
        if key[0] in self._seen:
            self._keep(key, array)
        else:
            if len(self._seen) >= MAX_KNOWN:
                self._seen.clear()
            self._seen.add(key[0])
        return array

    def _keep(self, key: tuple[bytes, bool | None], array: AnyArray) -> None:
        self._attached_nbytes += array.nbytes
        while self._attached and self._attached_nbytes > MAX_ATTACHED_NBYTES:
            _, dropped = self._attached.popitem(last=False)
            self._attached_nbytes -= dropped.nbytes
        self._attached[key] = array

    def forget(self) -> None:
        """Let go of what was attached."""
        self._attached.clear()
        self._seen.clear()
        self._attached_nbytes = 0
        self._places.clear()

    def close(self) -> None:
        """Let go of everything, for good."""
        self.forget()
        self._attach = _refuse


def _refuse(*_: object, **__: object) -> AnyArray:
    raise InternalError("an array was to be attached after the communicator was closed")
