"""The elements of a traced array one after the other, as ``x.flat``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_log import READ, WRITE
from nbparallel.distributed.races.recording.traced_array import (
    TracedArray,
    plain,
    read,
    recorder,
    seen,
    touch_at,
)


class TracedFlat:
    """A `numpy.flatiter` whose accesses are recorded."""

    def __init__(self, array: TracedArray) -> None:
        self._array, self._flat = array, plain(array).flat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flat, name)

    @property
    def base(self) -> TracedArray:
        """The array."""
        return self._array

    def __len__(self) -> int:
        return len(self._flat)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        at = self._flat.index
        found = next(self._flat)
        self._touch(at, READ)
        return found

    def copy(self) -> Any:
        """Return all elements as a plain array."""
        read(self._array)
        return self._flat.copy()

    def __array__(self, *args: Any, **options: Any) -> Any:
        read(self._array)
        return np.array(self._flat.copy(), *args, **options)

    def _touch(self, key: Any, kind: int, value: object = None) -> None:
        array = self._array
        if recorder() is None or not array.size:
            return
        chosen: Any = _positions(array.size, key)
        touch_at(array, np.unravel_index(chosen, array.shape), kind, value)

    def __getitem__(self, key: Any) -> Any:
        key = seen(key)
        found = self._flat[key]
        self._touch(key, READ)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        key, value = seen(key), seen(value)
        self._flat[key] = value
        self._touch(key, WRITE, value)

    def __eq__(self, other: object) -> Any:
        return self.copy() == seen(other)

    def __ne__(self, other: object) -> Any:
        return self.copy() != seen(other)


def _positions(size: int, key: Any) -> Any:
    """Return which elements an index takes."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return np.asarray([int(key) % size])
    if isinstance(key, slice):
        return np.arange(*key.indices(size))
    if isinstance(key, tuple) and len(key) == 1:
        return _positions(size, key[0])
    return np.arange(size)[key]
