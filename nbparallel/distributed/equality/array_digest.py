"""Digests of arrays, and the elements in which two arrays differ, by bytes that are equal where values are.

An array is read chunk by chunk, in its logical order, so that layout plays no part and what is copied
stays in cache.  Bytes say more than values in two places, which are evened out on request: a NaN has many bit
patterns, and the gaps of structured and long double elements hold whatever was there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.sharing.tensors import bits_name, readable_bits
from nbparallel.transfer.checksum import checksum_buffer

CHUNK = 1 << 20
"""Bytes: what differs is compared in pieces of this size, and only pieces that differ travel."""
DIGEST = 16
"""Bytes of one chunk's checksum."""
_X87_DIGITS, _X87_NBYTES = 63, 10
"""How numpy describes the long double of x86: 10 bytes of value, then a gap."""


def chunk_size(dtype: np.dtype[Any]) -> int:
    """Return how many elements of an array are one chunk."""
    return max(1, CHUNK // max(1, dtype.itemsize))


def chunk_of(array: AnyArray, number: int) -> AnyArray:
    """Return one chunk, flat and contiguous; a view if the array is contiguous."""
    count = chunk_size(array.dtype)
    start = number * count
    if array.flags.c_contiguous:
        return array.reshape(-1)[start : start + count]
    return np.asarray(array.flat[start : start + count])


def chunks(array: AnyArray) -> Iterator[AnyArray]:
    """Yield all chunks in order."""
    for number in range(-(-array.size // chunk_size(array.dtype))):
        yield chunk_of(array, number)


def checksums(array: AnyArray, *, exact: bool) -> bytes:
    """Return 16 bytes for each chunk; with `exact`, also NaN's bits and gaps make a difference."""
    if not array.dtype.itemsize:
        return b""
    found = []
    for chunk in chunks(array):
        octets = chunk.view(np.uint8) if exact else comparable(chunk)
        found.append(checksum_buffer(octets.reshape(-1).data))
    return b"".join(found)


def comparable(x: AnyArray) -> AnyArray:
    """Return the bytes of each element of a flat contiguous array, equal where the values are; (n, width)."""
    dtype, n = x.dtype, x.size
    if not (n and dtype.itemsize):
        return np.empty((n, 0), np.uint8)
    if dtype.names is not None:
        fields = [comparable(np.ascontiguousarray(x[name]).reshape(-1)) for name in dtype.names]
        return np.concatenate([np.empty((n, 0), np.uint8), *(f.reshape(n, -1) for f in fields)], axis=1)
    if dtype.kind in "fc":
        part = x.real.dtype if dtype.kind == "c" else dtype
        x = x.view(part)
        missing = np.isnan(x)
        if missing.any():
            x = np.where(missing, np.array(np.nan, part), x).astype(part, copy=False)
        octets = x.view(np.uint8).reshape(x.size, part.itemsize)
        if part.itemsize > _X87_NBYTES and np.finfo(part).nmant == _X87_DIGITS:
            octets = octets[:, :_X87_NBYTES]
        return np.ascontiguousarray(octets).reshape(n, -1)
    return x.view(np.uint8).reshape(n, dtype.itemsize)


@dataclass(slots=True)
class Differences:
    """Where two arrays of the same dtype and shape differ, as far as their chunks have been compared."""

    count: int = 0
    first: int = -1
    """Its index in the flat array."""
    here: str = ""
    there: str = ""
    apart: float = 0.0
    """The largest distance of two numbers that differ; NaN if one of them is no finite number."""

    def add(self, number: int, here: AnyArray, there: AnyArray) -> None:
        """Compare chunk `number` of both."""
        where = np.flatnonzero((comparable(here) != comparable(there)).any(axis=1))
        if not where.size:
            return
        if bits_name(here.dtype):
            here, there = readable_bits(here), readable_bits(there)
        if not self.count:
            self.first = number * chunk_size(here.dtype) + int(where[0])
            self.here, self.there = shown(here[where[0]]), shown(there[where[0]])
        self.count += where.size
        if here.dtype.kind in "fc":
            with np.errstate(all="ignore"):
                distance = np.abs(here[where] - there[where]).max()
            self.apart = max(self.apart, float(distance)) if np.isfinite(distance) else float("nan")


def shown(value: Any, limit: int = 60) -> str:
    """Return one element as people write it, cut to `limit` characters."""
    text = repr(value.item()) if isinstance(value, np.str_ | np.bytes_) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
