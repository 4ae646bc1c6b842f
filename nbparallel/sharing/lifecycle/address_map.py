"""Address map: which mapping an address belongs to."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbparallel.sharing.lifecycle.segment import Segment
from nbparallel.sharing.memory.array_layout import extent
from nbparallel.sharing.memory.mapping import Mapping

AnyArray = npt.NDArray[Any]
_interface_of: Any = np.ndarray.__array_interface__.__get__
_base_of: Any = np.ndarray.base.__get__
"""numpy's own, whatever a subclass makes of them: a traced array's base is another traced array."""


class ArrayLocation(NamedTuple):
    """Mapping and bytes of an array in this process."""

    mapping: Mapping
    """The mapping that holds all of its bytes."""
    segment: Segment
    """The segment that is mapped there."""
    offset: int
    """Offset in bytes of the element with all indices 0."""
    start: int
    """Offset of the first byte."""
    stop: int
    """Offset one past the last byte."""


class AddressMap:
    """Living mappings in order of address; not thread-safe, its store locks.

    An array is found by the addresses of its bytes, not by its chain of bases: so one that came through a
    memoryview, a tensor or `numpy.frombuffer` is found as well.
    """

    def __init__(self) -> None:
        # One list of (address, mapping, segment), which is replaced, never changed: an interrupt, a signal
        # handler, or a user's __del__ that calls us, never sees half of a change, and indices stay valid.
        # Addresses differ, so that comparing entries never compares the rest.
        self._entries: list[tuple[int, Mapping, Segment]] = []

    def add(self, mapping: Mapping, segment: Segment) -> None:
        """Enter a mapping (idempotent)."""
        while True:
            entries = self._entries
            at = bisect_left(entries, (mapping.address,))
            if at < len(entries) and entries[at][1] is mapping:
                return
            changed = [*entries[:at], (mapping.address, mapping, segment), *entries[at:]]
            if self._entries is entries:  # no other change in between: nothing is called from here on
                self._entries = changed
                return

    def remove(self, mapping: Mapping) -> None:
        """Remove a mapping (idempotent)."""
        while True:
            entries = self._entries
            at = bisect_left(entries, (mapping.address,))
            if at == len(entries) or entries[at][1] is not mapping:
                return
            changed = [*entries[:at], *entries[at + 1 :]]
            if self._entries is entries:
                self._entries = changed
                return

    def find(self, x: object) -> ArrayLocation | None:
        """Return where `x` is, or None if it is no array or in other memory."""
        entries = self._entries
        if not entries or not isinstance(x, np.ndarray):
            return None
        if x.size == 0:
            return self._find_empty(x)
        # Where nothing of it is written in Python, it takes half as long if that is not in the caches.
        address: int = _interface_of(x)["data"][0] if x.dtype.names is None else x.ctypes.data
        at = bisect_left(entries, (address + 1,)) - 1
        if at < 0:
            return None
        start, mapping, segment = entries[at]
        offset = address - start
        if offset >= mapping.nbytes:
            return None
        low, high = (0, x.nbytes) if x.flags.c_contiguous else extent(x.shape, x.strides, x.itemsize)
        if offset + low < 0 or offset + high > mapping.nbytes:
            return None
        return ArrayLocation(mapping, segment, offset, offset + low, offset + high)

    def _find_empty(self, x: AnyArray) -> ArrayLocation | None:
        """Find an array without elements: its address may end one mapping and begin the next."""
        root: Any = x
        while isinstance(base := _base_of(root), np.ndarray):
            root = base
        address: int = x.ctypes.data
        entries = self._entries
        at = bisect_left(entries, (address + 1,))
        for _, mapping, segment in reversed(entries[max(0, at - 2) : at]):
            offset = address - mapping.address
            if offset > mapping.nbytes:
                continue
            region = segment.region
            if mapping.living_root() is root or (region is not None and region.holds(root, offset)):
                return ArrayLocation(mapping, segment, offset, offset, offset)
        return None
