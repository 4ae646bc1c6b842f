"""Which gradients travel together: what follows from names, dtypes and shapes alone, worked out once.

A training loop averages arrays of the same forms again and again, so a plan is remembered by them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.slots.fingerprint import Fingerprint, fingerprint
from nbparallel.sharing.tensors import shown_dtype

BUCKET = 4 << 20
"""Bytes: far above what a reduction costs at least, and still in a last-level cache."""
ALONE = 8 << 10
"""Bytes for each member: copying a larger array into a bucket and back takes longer than a reduction of its
own, which takes the longer the more meet.  ``python -m benchmarks.operations.tuning``: the best, more or less
takes a tenth longer."""
Forms = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """What all ranks do with arrays of the same names, dtypes and shapes."""

    names: tuple[str, ...] | None
    forms: Forms
    bucket_nbytes: int
    members: int
    label: Fingerprint
    """Equal where names, dtypes, shapes and the size of a bucket are."""
    buckets: tuple[tuple[int, ...], ...]
    """Which arrays are reduced together: of one dtype, not empty; the largest bucket first."""
    order: tuple[int, ...]
    """The arrays in the order of the buckets if each is a bucket of its own; else empty."""

    def fits(
        self, names: tuple[str, ...] | None, arrays: list[Any], bucket_nbytes: Any, members: int
    ) -> bool:
        """Return whether it is the plan of this call, and each array a writable one of numpy.

        A loop that compares: to look a plan up, by a key made of all forms, takes twice as long.
        """
        if (
            names != self.names
            or members != self.members
            or type(bucket_nbytes) is not int
            or bucket_nbytes != self.bucket_nbytes
            or len(arrays) != len(self.forms)
        ):
            return False
        for x, (dtype, shape) in zip(arrays, self.forms, strict=True):
            if type(x) is not np.ndarray or x.dtype is not dtype or x.shape != shape or not x.flags.writeable:
                return False
        return True

    def listing(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each array: what must be the same on all ranks."""
        names = names_of(self.names, len(self.forms))
        return [(n, shown_dtype(dtype), shape) for n, (dtype, shape) in zip(names, self.forms, strict=True)]


def names_of(names: tuple[str, ...] | None, count: int) -> tuple[str, ...]:
    """Return what messages call the arrays; None: they came as a list."""
    return tuple(f"[{i}]" for i in range(count)) if names is None else names


@functools.lru_cache(maxsize=64)
def plan_of(names: tuple[str, ...] | None, forms: Forms, bucket_nbytes: int, members: int) -> BucketPlan:
    """Return the plan."""
    content = bucket_nbytes, names_of(names, len(forms)), [(str(dtype), shape) for dtype, shape in forms]
    first = [shown_dtype(forms[0][0]), str(forms[0][1])] if forms else ["-", "-"]
    label = fingerprint("average_gradients", *first, content=content)
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in forms]
    buckets = _buckets(forms, sizes, bucket_nbytes, members * ALONE)
    # A mismatch is found in the first reduction, for which the largest bucket of all ranks has to fit.
    buckets.sort(key=lambda bucket: -sum(sizes[i] for i in bucket))
    together = tuple(tuple(bucket) for bucket in buckets)
    order = tuple(bucket[0] for bucket in together) if all(len(b) == 1 for b in together) else ()
    return BucketPlan(names, forms, bucket_nbytes, members, label, together, order)


@functools.lru_cache(maxsize=64, typed=True)
def label_of_one(dtype: np.dtype[Any], shape: tuple[int, ...], bucket_nbytes: int) -> Fingerprint | None:
    """Return the label of a list of one array, None if it has to be checked further."""
    if dtype.kind not in "fc" or 0 in shape or type(bucket_nbytes) is not int or bucket_nbytes < 1:
        return None
    return plan_of(None, ((dtype, shape),), bucket_nbytes, 1).label


def _buckets(forms: Forms, sizes: list[int], bucket_nbytes: int, alone: int) -> list[list[int]]:
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
    return found
