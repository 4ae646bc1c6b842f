"""Averaging many arrays over all ranks: few large reductions instead of many small ones.

Small arrays of one dtype are packed one behind the other into flat buckets, which are reduced one after the
other; a large array is reduced where it is.  Where ranks have to say more than a fingerprint holds, a few
small ones ride along, and need no further reduction.  What goes where follows from dtypes, sizes and the
number of ranks only, so it is the same on every rank, and all of it is combined in rank order: all ranks get
the same bits.
"""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from nbparallel.distributed.arguments import overlapping_pair
from nbparallel.distributed.collectives.all_reduce import AllReduce
from nbparallel.distributed.data_parallel.buckets import BucketPlan, names_of, plan_of
from nbparallel.distributed.runtime.shared_arrays import AnyArray, SharedArrayLookup, Span, conflict
from nbparallel.errors import CollectiveMismatchError, rank_list

_HEAD = struct.Struct("<16s?dI")
"""Digest of the form, weight, number of parts of shared memory."""
_SPAN = struct.Struct("<QQQ")


@dataclass(slots=True)
class Gradients:
    """The arrays of one call, checked, in the order in which all ranks take them."""

    names: tuple[str, ...] | None
    """None: they came as a list."""
    arrays: list[AnyArray]
    weight: float | None
    bucket_nbytes: int
    members: int
    plan: BucketPlan = field(init=False)

    def __post_init__(self) -> None:
        forms = tuple([(x.dtype, x.shape) for x in self.arrays])
        self.plan = plan_of(self.names, forms, self.bucket_nbytes, self.members)

    def forms(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each: what must be the same on all ranks."""
        names = names_of(self.names, len(self.arrays))
        return [(n, str(x.dtype), x.shape) for n, x in zip(names, self.arrays, strict=True)]

    def announcement(self, memory: SharedArrayLookup) -> bytes:
        """Return what the others must know before anything is written: form, weight, shared memory."""
        weight = self.weight
        weighted = weight is not None
        spans = [
            _SPAN.pack(place.segment, place.start, place.stop)
            for x in self.arrays
            if x.base is not None and (place := memory.place(x)) is not None
        ]
        head = _HEAD.pack(self.plan.digest, weighted, 1.0 if weight is None else weight, len(spans))
        return head + b"".join(spans) if spans else head

    def riding(self) -> bytes:
        """Return the content of all arrays, bucket by bucket, if they are small enough to ride along."""
        if not self.plan.rides:
            return b""
        return b"".join([x.tobytes() for bucket in self.buckets() for x in bucket])

    def buckets(self) -> list[list[AnyArray]]:
        """Return the arrays that are reduced together."""
        return [self.bucket(i) for i in range(len(self.plan.buckets))]

    def bucket(self, i: int) -> list[AnyArray]:
        """Return the arrays of one bucket."""
        return [self.arrays[at] for at in self.plan.buckets[i]]


def checked_gradients(arrays: Any, weight: Any, bucket_nbytes: Any, members: int) -> Gradients:
    """Return what a user passed to `average_gradients`; its errors name the array that is wrong."""
    names: tuple[str, ...] | None = None
    if isinstance(arrays, np.ndarray):
        names, passed = ("",), [arrays]
    elif isinstance(arrays, Mapping):
        entries = sorted(((f"[{key!r}]", x) for key, x in arrays.items()), key=lambda entry: entry[0])
        names, passed = tuple(name for name, _ in entries), [x for _, x in entries]
    elif isinstance(arrays, Iterable) and not isinstance(arrays, str | bytes):
        passed = list(arrays)
    else:
        raise TypeError(
            "average_gradients needs an array, a list of arrays or a dict of them, not "
            f"{type(arrays).__name__}"
        )
    plain = [
        x
        if type(x) is np.ndarray and x.dtype.kind in "fc" and x.flags.writeable
        else _checked(f"arrays{names_of(names, len(passed))[i]}", x)
        for i, x in enumerate(passed)
    ]
    pair = overlapping_pair(plain)
    if pair is not None:
        one, other = (names_of(names, len(passed))[i] for i in pair)
        raise ValueError(
            f"arrays{one} and arrays{other} share memory, and average_gradients writes both: each needs "
            "memory of its own"
        )
    if isinstance(bucket_nbytes, bool) or not isinstance(bucket_nbytes, int) or bucket_nbytes < 1:
        raise ValueError(f"bucket_nbytes must be a number of bytes, at least 1, not {bucket_nbytes!r}")
    return Gradients(names, plain, _checked_weight(weight), bucket_nbytes, members)


def _checked(name: str, x: Any) -> AnyArray:
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"average_gradients averages numpy arrays in place; {name} is {type(x).__name__}")
    if x.dtype.kind not in "fc":
        raise TypeError(
            f"an average needs floating-point numbers, and {name} is {x.dtype}: convert it first "
            "(.astype(float))"
        )
    if not x.flags.writeable:
        raise ValueError(
            f"average_gradients writes the averages into {name}, which is read-only: pass a copy"
        )
    return x if type(x) is np.ndarray else x.view(np.ndarray)


def _checked_weight(weight: Any) -> float | None:
    if weight is None:
        return None
    if not isinstance(weight, numbers.Real | np.bool_):
        raise TypeError(f"weight must be a number, such as len(batch), not {type(weight).__name__}")
    value = float(weight)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"weight must be a finite number and not negative, not {weight!r}")
    return value


def check_announcements(told: Sequence[bytes], ranks: Sequence[int]) -> tuple[bool, float | None]:
    """Return whether all ranks pass the same arrays, and the sum of their weights, None without any.

    Raises
    ------
    ValueError
        Some ranks pass a weight and some do not, all weights are 0, or two ranks would write the same
        shared memory.
    """
    heads = [_HEAD.unpack_from(data) for data in told]
    if heads.count(heads[0]) == len(heads) and not (heads[0][1] or heads[0][3]):
        return True, None  # the same arrays, private to each rank, and no weights: as nearly always
    if len({head[0] for head in heads}) > 1:
        return False, None
    spans: list[list[tuple[Span, bool]]] = [
        [(span, True) for span in _SPAN.iter_unpack(memoryview(data)[_HEAD.size : _start(data)])]
        for data in told
    ]
    found = conflict(spans) if any(spans) else None
    if found is not None:
        first, second = sorted(ranks[i] for i in found)
        raise ValueError(
            f"ranks {first} and {second} passed overlapping memory of one shared array to average_gradients, "
            "which would write it: each rank needs gradients of its own, so pass x.copy()"
        )
    with_weight = [rank for rank, (_, weighted, *_) in zip(ranks, heads, strict=True) if weighted]
    if not with_weight:
        return True, None
    if len(with_weight) < len(ranks):
        without = rank_list(set(ranks) - set(with_weight))
        raise ValueError(
            f"{rank_list(with_weight)} passed weight= to average_gradients, and {without} did not: all ranks "
            "must, or none"
        )
    total = math.fsum(head[2] for head in heads)
    if not total:
        raise ValueError("the weights of all ranks are 0: there is nothing to average")
    return True, total


def _start(data: bytes) -> int:
    """Return where what rides along begins."""
    return _HEAD.size + int(_HEAD.unpack_from(data)[3]) * _SPAN.size


Form = tuple[str, str, tuple[int, ...]]


def mismatch(told: Sequence[tuple[list[Form], int]], ranks: Sequence[int]) -> CollectiveMismatchError:
    """Return the error that names the first array in which ranks differ."""
    sizes = [f"bucket_nbytes={size}" for _, size in told]
    counts = [f"{len(forms)} array{'s' if len(forms) != 1 else ''}" for forms, _ in told]
    parts = [_by_rank(sizes, ranks), _by_rank(counts, ranks)]
    for forms in zip_longest(*(forms for forms, _ in told)):
        texts = ["no more" if f is None else f"arrays{f[0]}, {f[1]} of shape {f[2]}" for f in forms]
        if len(set(texts)) > 1:
            parts.append(("the first that differs: " if parts[1] else "") + _by_rank(texts, ranks))
            break
    text = "; ".join(part for part in parts if part)
    return CollectiveMismatchError(
        f"average_gradients: ranks passed different arrays: {text}. Nothing was written"
    )


def _by_rank(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Say which ranks passed what; empty if all passed the same."""
    found: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        found.setdefault(text, []).append(rank)
    if len(found) == 1:
        return ""
    return "; ".join(f"{rank_list(passed)} passed {text}" for text, passed in found.items())


def average(
    gradients: Gradients,
    total: float | None,
    all_reduce: AllReduce,
    deadline_ns: int | None,
    done: int | None = None,
) -> None:
    """Replace the arrays by their averages over all ranks, but for those of the bucket that is `done`."""
    factor = None if total is None or gradients.weight is None else gradients.weight / total
    op = "avg" if factor is None else "sum"
    for i, places in enumerate(gradients.plan.buckets):
        if i == done:
            continue
        if factor is None and len(places) == 1:
            all_reduce.run(gradients.arrays[places[0]], op, deadline_ns)
            continue
        bucket = gradients.bucket(i)
        flat = packed(bucket)
        _scale(flat, factor)
        all_reduce.run(flat, op, deadline_ns)
        unpack(flat, bucket)


def packed(bucket: list[AnyArray]) -> AnyArray:
    """Return the content of some arrays in one; of one array itself."""
    if len(bucket) == 1:
        return bucket[0]
    return np.concatenate([x.reshape(-1) for x in bucket], dtype=bucket[0].dtype)


def average_riding(gradients: Gradients, total: float | None, told: Sequence[bytes]) -> None:
    """Replace the arrays by their averages over all ranks, whose announcements brought them along."""
    starts = [_start(data) for data in told]
    with np.errstate(all="ignore"):
        for bucket in gradients.buckets():
            dtype, count = bucket[0].dtype, sum([x.size for x in bucket])
            brought = [
                np.frombuffer(data, dtype, count, start) for data, start in zip(told, starts, strict=True)
            ]
            if total is not None:
                brought = [x.copy() for x in brought]
                for x, data in zip(brought, told, strict=True):
                    _scale(x, float(_HEAD.unpack_from(data)[2]) / total)
            combined = brought[0].copy() if len(told) == 1 else np.add(brought[0], brought[1])
            combined = combined.astype(dtype, copy=False)  # numpy adds in native order
            for x in brought[2:]:
                np.add(combined, x, out=combined)
            if total is None and len(told) > 1:
                np.true_divide(combined, len(told), out=combined)
            unpack(combined, bucket)
            starts = [start + combined.nbytes for start in starts]


def unpack(flat: AnyArray, bucket: list[AnyArray]) -> None:
    """Write what lies one behind the other into the arrays that it belongs to."""
    if flat is bucket[0]:
        return
    start = 0
    for x in bucket:
        x[...] = flat[start : start + x.size].reshape(x.shape)
        start += x.size


def _scale(x: AnyArray, factor: float | None) -> None:
    if factor == 0:
        x[...] = 0  # the mean of an empty batch is NaN, and times 0 it still is
    elif factor is not None:
        np.multiply(x, factor, out=x)
