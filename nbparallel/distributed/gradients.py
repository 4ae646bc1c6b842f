"""Averaging many arrays over all ranks: few large reductions instead of many small ones.

Small arrays of one dtype are packed one behind the other into flat buckets, which are reduced one after the
other; a large array is reduced where it is.  A few small ones ride along when the ranks compare what they
pass, and need no further reduction.  What goes where follows from dtypes and sizes only, so it is the same on
every rank, and all of it is combined in rank order: all ranks get the same bits.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from nbparallel.distributed.arguments import overlapping_pair
from nbparallel.distributed.memory import AnyArray, Span, conflict
from nbparallel.errors import CollectiveMismatchError, rank_list
from nbparallel.sharing.store import Store

BUCKET = 4 << 20
"""Bytes: far above what a reduction costs at least, and still in a last-level cache."""
ALONE = 256 << 10
"""Bytes: copying a larger array into a bucket and back takes longer than a reduction of its own."""
RIDE = 8 << 10
"""Bytes of all arrays together that ride along: half a slot of a small group."""
_HEAD = struct.Struct("<16s?dI")
"""Digest of the form, weight, number of parts of shared memory."""
_SPAN = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Gradients:
    """The arrays of one call, checked, in the order in which all ranks take them."""

    names: list[str]
    arrays: list[AnyArray]
    weight: float | None
    bucket_nbytes: int

    def forms(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each: what must be the same on all ranks."""
        return [(n, str(x.dtype), x.shape) for n, x in zip(self.names, self.arrays, strict=True)]

    def announcement(self, store: Store) -> bytes:
        """Return what the others must know before anything is written: form, weight, shared memory."""
        said = repr((self.bucket_nbytes, self.names, [(x.dtype.str, x.shape) for x in self.arrays]))
        digest = hashlib.blake2b(said.encode("utf-8", "backslashreplace"), digest_size=16).digest()
        weighted = self.weight is not None
        spans = []
        for x in self.arrays:
            location = store.location(x) if x.base is not None else None
            if location is not None:
                spans.append(_SPAN.pack(location.segment, location.start, location.stop))
        weight = self.weight if self.weight is not None else 1.0
        return _HEAD.pack(digest, weighted, weight, len(spans)) + b"".join(spans)

    @property
    def rides(self) -> bool:
        """Whether all arrays together are so small that they ride along with the announcement."""
        return sum(x.nbytes for x in self.arrays) <= RIDE

    def riding(self) -> bytes:
        """Return the content of all arrays, bucket by bucket."""
        return b"".join(x.tobytes() for bucket in self.buckets() for x in bucket)

    def buckets(self) -> Iterator[list[AnyArray]]:
        """Yield the arrays that are reduced together: of one dtype, not empty."""
        open_buckets: dict[np.dtype[Any], list[AnyArray]] = {}
        filled: dict[np.dtype[Any], int] = {}
        alone = min(self.bucket_nbytes, ALONE)
        for x in self.arrays:
            if not x.size:
                continue
            if x.nbytes >= alone:
                yield [x]
                continue
            bucket = open_buckets.setdefault(x.dtype, [])
            if bucket and filled[x.dtype] + x.nbytes > self.bucket_nbytes:
                yield bucket
                bucket = open_buckets[x.dtype] = []
            filled[x.dtype] = (filled[x.dtype] if bucket else 0) + x.nbytes
            bucket.append(x)
        yield from (bucket for bucket in open_buckets.values() if bucket)


def checked_gradients(arrays: Any, weight: Any, bucket_nbytes: Any) -> Gradients:
    """Return what a user passed to `average_gradients`; its errors name the array that is wrong."""
    if isinstance(arrays, np.ndarray):
        named = [("", arrays)]
    elif isinstance(arrays, Mapping):
        named = sorted(((f"[{key!r}]", x) for key, x in arrays.items()), key=lambda entry: entry[0])
    elif isinstance(arrays, Iterable) and not isinstance(arrays, str | bytes):
        named = [(f"[{i}]", x) for i, x in enumerate(arrays)]
    else:
        raise TypeError(
            "average_gradients needs an array, a list of arrays or a dict of them, not "
            f"{type(arrays).__name__}"
        )
    plain = [_checked(f"arrays{name}", x) for name, x in named]
    pair = overlapping_pair(plain)
    if pair is not None:
        raise ValueError(
            f"arrays{named[pair[0]][0]} and arrays{named[pair[1]][0]} share memory, and average_gradients "
            "writes both: each needs memory of its own"
        )
    if isinstance(bucket_nbytes, bool) or not isinstance(bucket_nbytes, int) or bucket_nbytes < 1:
        raise ValueError(f"bucket_nbytes must be a number of bytes, at least 1, not {bucket_nbytes!r}")
    return Gradients([name for name, _ in named], plain, _checked_weight(weight), bucket_nbytes)


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
    with_weight = [rank for rank, (_, weighted, _, _) in zip(ranks, heads, strict=True) if weighted]
    if not with_weight:
        return True, None
    if len(with_weight) < len(ranks):
        without = rank_list(set(ranks) - set(with_weight))
        raise ValueError(
            f"{rank_list(with_weight)} passed weight= to average_gradients, and {without} did not: all ranks "
            "must, or none"
        )
    total = math.fsum(weight for _, _, weight, _ in heads)
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


def average(gradients: Gradients, total: float | None, reduce: Callable[[AnyArray, str], Any]) -> None:
    """Replace the arrays by their averages over all ranks; ``reduce(x, op)`` is `all_reduce`."""
    factor = None if total is None or gradients.weight is None else gradients.weight / total
    op = "avg" if factor is None else "sum"
    for bucket in gradients.buckets():
        if len(bucket) == 1:
            _scale(bucket[0], factor)
            reduce(bucket[0], op)
            continue
        flat = np.empty(sum(x.size for x in bucket), bucket[0].dtype)
        start = 0
        for x in bucket:
            flat[start : start + x.size].reshape(x.shape)[...] = x
            start += x.size
        _scale(flat, factor)
        reduce(flat, op)
        _unpack(flat, bucket)


def average_riding(gradients: Gradients, total: float | None, told: Sequence[bytes]) -> None:
    """Replace the arrays by their averages over all ranks, whose announcements brought them along."""
    starts = [_start(data) for data in told]
    factors = [None if total is None else float(_HEAD.unpack_from(data)[2]) / total for data in told]
    for bucket in gradients.buckets():
        dtype, count = bucket[0].dtype, sum(x.size for x in bucket)
        with np.errstate(all="ignore"):
            combined: AnyArray | None = None
            for data, start, factor in zip(told, starts, factors, strict=True):
                theirs = np.frombuffer(data, dtype, count, start).copy()
                _scale(theirs, factor)
                combined = theirs if combined is None else np.add(combined, theirs, out=combined)
            assert combined is not None, "there is at least this rank"
            if total is None and len(told) > 1:
                np.true_divide(combined, len(told), out=combined)
        _unpack(combined, bucket)
        starts = [start + combined.nbytes for start in starts]


def _unpack(flat: AnyArray, bucket: list[AnyArray]) -> None:
    """Write what lies one behind the other into the arrays that it belongs to."""
    start = 0
    for x in bucket:
        x[...] = flat[start : start + x.size].reshape(x.shape)
        start += x.size


def _scale(x: AnyArray, factor: float | None) -> None:
    if factor == 0:
        x[...] = 0  # the mean of an empty batch is NaN, and times 0 it still is
    elif factor is not None:
        np.multiply(x, factor, out=x)
