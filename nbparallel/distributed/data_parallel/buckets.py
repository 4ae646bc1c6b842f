"""Which gradients travel together: what follows from names, dtypes and shapes alone, worked out once.

A training loop averages arrays of the same forms again and again, so a plan is remembered by them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

BUCKET = 4 << 20
"""Bytes: far above what a reduction costs at least, and still in a last-level cache."""
ALONE = 8 << 10
"""Bytes for each member: copying a larger array into a bucket and back takes longer than a reduction of its
own, which takes the longer the more meet.  ``python -m benchmarks.operations.tuning``: the best, more or less
takes a tenth longer."""
RIDE = 8 << 10
"""Bytes of all arrays together that ride along with the comparison: half a slot of a small group."""
Forms = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """What all ranks do with arrays of the same names and forms."""

    digest: bytes
    """Equal where names, forms and the size of a bucket are."""
    buckets: tuple[tuple[int, ...], ...]
    """Which arrays are reduced together: of one dtype, not empty."""
    rides: bool
    """Whether all of them together are so small that they ride along."""
    first: int
    """The largest bucket: its reduction begins together with the comparison."""


def names_of(names: tuple[str, ...] | None, count: int) -> tuple[str, ...]:
    """Return what messages call the arrays; None: they came as a list."""
    return tuple(f"[{i}]" for i in range(count)) if names is None else names


@functools.lru_cache(maxsize=64)
def plan_of(names: tuple[str, ...] | None, forms: Forms, bucket_nbytes: int, members: int) -> BucketPlan:
    """Return the plan."""
    said = repr((bucket_nbytes, names_of(names, len(forms)), [(dtype.str, shape) for dtype, shape in forms]))
    digest = hashlib.blake2b(said.encode("utf-8", "backslashreplace"), digest_size=16).digest()
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in forms]
    buckets = _buckets(forms, sizes, bucket_nbytes, members * ALONE)
    loads = [sum(sizes[i] for i in bucket) for bucket in buckets]
    return BucketPlan(digest, buckets, sum(sizes) <= RIDE, loads.index(max(loads)) if loads else 0)


def _buckets(forms: Forms, sizes: list[int], bucket_nbytes: int, alone: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = []
    growing: dict[np.dtype[Any], list[int]] = {}
    filled: dict[np.dtype[Any], int] = {}
    for i, nbytes in enumerate(sizes):
        dtype = forms[i][0]
        if not nbytes:
            continue
        if nbytes >= min(bucket_nbytes, alone):
            found.append([i])
            continue
        if dtype not in growing or filled[dtype] + nbytes > bucket_nbytes:
            growing[dtype], filled[dtype] = [], 0
            found.append(growing[dtype])
        growing[dtype].append(i)
        filled[dtype] += nbytes
    return tuple(tuple(bucket) for bucket in found)
