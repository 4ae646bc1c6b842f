"""Arrays in the arguments of an operation: the plain ones that it works with, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbparallel.distributed.races.recording.traced_array import TracedArray, plain, trace

_CONTAINERS = (list, tuple, dict)
MAX_DEPTH = 8
"""Containers in containers; deeper ones, and those that hold themselves, are pickled as they are."""


def arrays_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield all arrays in nested lists, tuples and dicts."""
    if isinstance(value, np.ndarray):
        yield value
    elif type(value) in _CONTAINERS and depth < MAX_DEPTH:
        for part in value.values() if type(value) is dict else value:
            yield from arrays_in(part, depth + 1)


class PlainArguments:
    """Turns traced arrays in arguments into plain ones, and results into what the caller passed.

    A container is replaced only if a traced array is in it: an operation may put values into others.
    """

    def __init__(self) -> None:
        self._originals: dict[int, tuple[Any, Any]] = {}
        """By the identity of what stands for it, which is kept, so that no other object gets its number."""

    def plain(self, value: Any, depth: int = 0) -> Any:
        """Return a value with plain arrays."""
        kind = type(value)
        if kind is TracedArray:
            return self._replace(value, plain(value))
        if kind not in _CONTAINERS or depth > MAX_DEPTH:
            return value
        parts = list(value.values() if kind is dict else value)
        found = [self.plain(part, depth + 1) for part in parts]
        if all(one is other for one, other in zip(parts, found, strict=True)):
            return value
        return self._replace(value, dict(zip(value, found, strict=True)) if kind is dict else kind(found))

    def _replace(self, original: Any, replacement: Any) -> Any:
        self._originals[id(replacement)] = replacement, original
        return replacement

    def original(self, value: Any, depth: int = 0) -> Any:
        """Return what the caller passed, if an operation returns it; in lists and tuples too."""
        known = self._originals.get(id(value))
        if known is not None:
            return known[1]
        if type(value) in (list, tuple) and depth < MAX_DEPTH:
            found = [self.original(part, depth + 1) for part in value]
            if any(one is not other for one, other in zip(value, found, strict=True)):
                return type(value)(found)
        return value


def trace_views(value: Any, depth: int = 0) -> Any:
    """Return a result in which views of other ranks' arrays, which are read-only, are traced."""
    if type(value) is np.ndarray:
        return value if value.flags.writeable else trace(value)
    if type(value) in (list, tuple) and depth < MAX_DEPTH:
        found = [trace_views(part, depth + 1) for part in value]
        if any(one is not other for one, other in zip(value, found, strict=True)):
            return type(value)(found)
    return value
