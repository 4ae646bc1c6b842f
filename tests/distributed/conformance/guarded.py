"""Buffers with guard bytes on all sides, looked at after each operation; and inputs that must stay."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of

LAYOUTS = ("private", "shared", "strided", "shared strided", "backwards", "fortran")
GUARD = 64
"""Bytes before and after: as much as the strictest alignment."""
PATTERN = 0xA5


class Guards:
    """Makes buffers for one operation, and looks afterwards at all that it should have left alone."""

    def __init__(self, communicator: Communicator) -> None:
        self._store = context_of(communicator).store
        self._surroundings: list[tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]] = []
        self._inputs: list[tuple[np.ndarray[Any, Any], bytes]] = []
        self._before: list[bytes] = []

    def buffer(self, shape: Any, dtype: Any, layout: str = "private") -> np.ndarray[Any, Any]:
        """Return an array of this layout, full of the guards' pattern, and so is what lies between."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        step = 2 if "strided" in layout else 1
        count = int(np.prod(shape)) * dtype.itemsize * step
        make = self._store.empty if layout.startswith("shared") else np.empty
        memory = make((count + 2 * GUARD,), np.uint8)
        memory[...] = PATTERN
        order = "F" if layout == "fortran" else "C"
        both = np.ndarray((*shape, step), dtype, memory, GUARD, order=order)
        outside = [memory[:GUARD], memory[GUARD + count :]]
        if step == 2:
            octets = (*shape, dtype.itemsize)
            outside.append(
                np.ndarray(octets, np.uint8, memory, GUARD + both.strides[-1], (*both.strides[:-1], 1))
            )
        self._surroundings.append((memory, outside))
        found = both[..., 0]
        return found[::-1] if layout == "backwards" and shape else found

    def filled(self, x: np.ndarray[Any, Any], layout: str = "private") -> np.ndarray[Any, Any]:
        """Return an array of the content of `x`, which the operation may change."""
        found = self.buffer(x.shape, x.dtype, layout)
        found[...] = x
        return found

    def input(self, x: np.ndarray[Any, Any], layout: str = "private") -> np.ndarray[Any, Any]:
        """Return an array of the content of `x`, which must stay as it is."""
        found = self.filled(x, layout)
        self._inputs.append((found, found.tobytes()))
        return found

    def remember(self) -> None:
        """Remember every byte, for `untouched`."""
        self._before = [memory.tobytes() for memory, _ in self._surroundings]

    def untouched(self) -> bool:
        """Whether nothing was written at all since `remember`."""
        return self._before == [memory.tobytes() for memory, _ in self._surroundings]

    def check(self) -> None:
        """Assert that nothing was written but where the operation has to write."""
        for _, outside in self._surroundings:
            assert all((part == PATTERN).all() for part in outside), "it wrote beside a buffer"
        for array, before in self._inputs:
            assert array.tobytes() == before, "it wrote into its input"
