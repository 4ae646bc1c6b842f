"""What printing an array reads: all of a small one, the edges of a large one."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_log import READ
from nbparallel.distributed.races.recording.traced_array import TracedArray, plain, touch, trace


def read_printed(array: TracedArray, threshold: Any = None, edgeitems: Any = None) -> None:
    """Record what is read to print an array; the limits are those of `numpy.set_printoptions`."""
    options = np.get_printoptions()
    threshold = options["threshold"] if threshold is None else threshold
    edge = options["edgeitems"] if edgeitems is None else edgeitems
    if array.size <= threshold:
        touch(array, READ)
        return
    axes = [
        (slice(0, edge), slice(length - edge, length)) if length > 2 * edge else (slice(None),)
        for length in array.shape
    ]
    for key in product(*axes):
        touch(trace(plain(array)[key]), READ)
