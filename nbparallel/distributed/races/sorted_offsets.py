"""Offsets of elements in ascending order, each once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def distinct(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return offsets in ascending order, each once.

    `numpy.unique` does so with a table from version 2.3 on, in 30 times the time for multiples of 8.
    """
    ordered = np.sort(offsets, axis=None)
    is_new = np.ones(ordered.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]
