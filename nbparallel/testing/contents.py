"""Contents: what an array holds, as a number to compare between processes."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy.typing as npt


def checksum(x: npt.NDArray[Any], start: int = 0) -> int:
    """Return a number that is equal for equal elements; the padding between fields does not count.

    >>> checksum(np.arange(6).reshape(2, 3).T) == checksum(np.array([[0, 3], [1, 4], [2, 5]]))
    True
    """
    if x.dtype.names is None:
        return crc32(x.tobytes(), start)
    for name in x.dtype.names:
        start = checksum(x[name], start)
    return start
