"""Plain values: numbers and short strings, which Python's own pickler can do, much sooner than ours."""

from __future__ import annotations

from types import NoneType
from typing import Any

import numpy as np

MAX_LENGTH = 4096
"""Characters or bytes; what is longer may have to travel beside the stream."""
_TEXT = frozenset({str, bytes})
_NUMBERS = frozenset({int, float, complex, bool, NoneType}) | {
    kind for kind in np.sctypeDict.values() if issubclass(kind, np.bool_ | np.number)
}


def is_plain(obj: Any) -> bool:
    """Whether nothing in `obj` needs our pickler, and it is small.

    >>> is_plain(np.float32(1.5)), is_plain("x" * 5000), is_plain([1])
    (True, False, False)
    """
    kind = type(obj)
    if kind is int:
        return bool(-(1 << 64) < obj < 1 << 64)
    return kind in _NUMBERS or (kind in _TEXT and len(obj) <= MAX_LENGTH)
