"""Blobs: large buffers of a pickled object, written once into a segment, mapped copy-on-write.

A private mapping is no snapshot: pages that this process did not write show later writes of others.  So
no process writes a blob's segment again, and the store does not reuse it while any process maps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from nbparallel.errors import InternalError
from nbparallel.sharing import Access, Location, SegmentSource
from nbparallel.sharing.memory.mapping import Root
from nbparallel.wire.handles import ArrayHandle

ALIGNMENT = 64
"""Bytes; where a buffer starts in a blob: a cache line, and enough for every vector instruction."""


_ZEROS = memoryview(bytes(ALIGNMENT))


class ArrayStore(Protocol):
    """The part of `nbparallel.sharing.Store` that objects on their way need."""

    rights_changes: int
    """Counts changes of rights and ids."""

    def join(self, parts: Sequence[memoryview]) -> np.ndarray[Any, Any]:
        """Return a new shared array of bytes: those of `parts`, one behind the other."""

    def handle(
        self, x: np.ndarray[Any, Any], *, broker: Any = None, writable: bool | None = False
    ) -> ArrayHandle | None:
        """Return the handle of a shared array, None if it is not shared.

        `writable` None: if every process of the session may write there, and `x` itself may be written.
        """

    def share(
        self, x: np.ndarray[Any, Any], *, strategy: str | None = None, for_all: bool = False
    ) -> np.ndarray[Any, Any]:
        """Return `x` if it is shared, else a copy that is; `for_all`: every process may write to it."""

    def location(self, x: object) -> Location | None:
        """Return segment and bytes of a shared array, None if it is not shared."""

    def adopt(self, source: SegmentSource, access: Access, *, for_all: bool) -> Root:
        """Return the root of memory that was made elsewhere."""

    def attach(
        self, handle: ArrayHandle, *, writable: bool = False, private: bool = False, broker: Any = None
    ) -> np.ndarray[Any, Any]:
        """Return the array that `handle` describes; `private`: copy-on-write."""


class ByValue:
    """A store for messages to another machine: no array is shared, and no buffer leaves the stream."""

    rights_changes = 0

    # docstrings as those of `ArrayStore`; what would need memory of this machine is never called

    def handle(self, x: object, *, broker: Any = None, writable: bool | None = False) -> None:
        return None

    def location(self, x: object) -> None:
        return None

    def packed_read_only(self, x: object) -> None:
        return None

    def join(self, parts: Sequence[memoryview]) -> np.ndarray[Any, Any]:
        raise self._misused()

    def share(self, x: object, *, strategy: str | None = None, for_all: bool = False) -> Any:
        raise self._misused()

    def adopt(self, source: SegmentSource, access: Access, *, for_all: bool) -> Root:
        raise self._misused()

    def attach(self, handle: ArrayHandle, **_: Any) -> np.ndarray[Any, Any]:
        raise self._misused()

    @staticmethod
    def _misused() -> InternalError:
        return InternalError(
            "a message to another machine was to refer to memory of this one; please file a bug"
        )


class CommonCopies(Protocol):
    """Copies of private arrays that several messages share."""

    def copy(self, array: np.ndarray[Any, Any], store: ArrayStore) -> np.ndarray[Any, Any] | None:
        """Return a shared copy of `array` that no process writes to; None: each message has its own."""


def shared_copy(
    array: np.ndarray[Any, Any], store: ArrayStore, copies: bool | CommonCopies
) -> tuple[np.ndarray[Any, Any], bool]:
    """Return a shared copy of an array, and whether other messages have it too: map it copy-on-write."""
    common = None if isinstance(copies, bool) else copies.copy(array, store)
    return (store.share(array, for_all=True), False) if common is None else (common, True)


def write_blob(
    parts: Sequence[memoryview], store: ArrayStore, *, broker: Any = None
) -> tuple[ArrayHandle, tuple[tuple[int, int], ...], np.ndarray[Any, Any]]:
    """Write `parts` into one new segment.

    Returns
    -------
    handle : ArrayHandle
        Of the whole blob, one-dimensional bytes.
    regions : tuple of (offset, length)
        Of each part, in bytes, relative to the blob.
    owner : ndarray
        Keeps the segment alive; drop it when every receiver has mapped the blob.
    """
    regions, content = [], []
    end = 0
    for part in parts:
        padding = -end % ALIGNMENT
        content += [_ZEROS[:padding], part] if padding else [part]
        regions.append((end + padding, part.nbytes))
        end += padding + part.nbytes
    owner = store.join(content if end else [_ZEROS[:1]])
    handle = store.handle(owner, broker=broker)
    if handle is None:
        raise InternalError("a new array of the store is not shared")
    return handle, tuple(regions), owner


def map_blob(handle: ArrayHandle, store: ArrayStore, *, broker: Any = None) -> memoryview:
    """Return the blob's bytes, writable, private to this process; they live as long as a view does."""
    return store.attach(handle, private=True, broker=broker).data
