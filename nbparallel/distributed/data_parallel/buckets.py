"""Which gradients travel together: what follows from names, dtypes and shapes alone, worked out once.

A training loop averages arrays of the same forms again and again, so a plan is remembered by them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.all_reduce import Averaging
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
    operators: tuple[Averaging, Averaging]
    """Of the first bucket, by which ranks compare their labels, and of the others."""
    buckets: tuple[tuple[int, ...], ...]
    """Which arrays are reduced together: of one dtype, not empty; the largest bucket first."""
    order: tuple[int, ...] | None
    """If each array is a bucket of its own: their order, empty as they come; else None."""

    def fits(
        self, names: tuple[str, ...] | None, arrays: list[Any], bucket_nbytes: Any, members: int
    ) -> bool:
        """Return whether it is the plan of this call, and each array a writable one of numpy.

        A loop that compares: to look a plan up, by a key made of all forms, takes twice as long.
        """
        if (
            len(arrays) != len(self.forms)
            or names != self.names
            or members != self.members
            or type(bucket_nbytes) is not int
            or bucket_nbytes != self.bucket_nbytes
        ):
            return False
        plain = np.ndarray
        for x, (dtype, shape) in zip(arrays, self.forms):  # noqa: B905 - as many; a keyword takes as long as x
            if type(x) is not plain or x.dtype is not dtype or x.shape != shape or not x.flags.writeable:
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
    order = tuple(bucket[0] for bucket in together) if all(len(b) == 1 for b in together) else None
    if order == tuple(range(len(forms))):
        order = ()
    operators = Averaging(lambda _: label, True), Averaging(lambda _: label, False)
    return BucketPlan(names, forms, bucket_nbytes, members, label, operators, together, order)


def _label_of_one(x: np.ndarray[Any, Any]) -> Fingerprint | None:
    if x.dtype.kind not in "fc" or not x.size:
        return None
    return plan_of(None, ((x.dtype, x.shape),), BUCKET, 1).label


ONE = Averaging(_label_of_one, True)
"""The operator of a list of one array: as quick as an all_reduce, its plan is found by dtype and shape."""


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
