"""Arrays of every dtype and layout, drawn by Hypothesis."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

AnyArray = npt.NDArray[Any]

SPECIAL_DTYPES = [
    np.dtype(np.longdouble),
    np.dtype("V7"),
    np.dtype([("a", "i1"), ("b", ">f8", (2, 3))], align=True),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [8, 0], "itemsize": 24}),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [0, 2]}),
    np.dtype([(("a title", "a"), "i4")]),
    np.dtype([("x", [("y", ">f2"), ("z", "m8[25us]")])]),
]
"""Dtypes that `hypothesis` draws seldom or never: aligned, overlapping, out of order, titled, nested."""
LARGE_NBYTES = 400_000
"""More than what is packed into regions."""


def dtypes() -> st.SearchStrategy[np.dtype[Any]]:
    """Draw a dtype without Python objects: scalar of any byte order, structured, with subarrays."""
    return st.one_of(
        hnp.scalar_dtypes(), hnp.array_dtypes(allow_subarrays=True), st.sampled_from(SPECIAL_DTYPES)
    )


def _stepped(draw: st.DrawFn, x: AnyArray) -> AnyArray:
    steps = draw(st.tuples(*[st.sampled_from([1, -1, 2, -3]) for _ in x.shape]))
    view: AnyArray = x[tuple(slice(None, None, step) for step in steps) or ...]
    return view


def _turned(draw: st.DrawFn, x: AnyArray) -> AnyArray:
    return x.transpose(draw(st.permutations(range(x.ndim))))


def _cut(draw: st.DrawFn, x: AnyArray) -> AnyArray:
    index = draw(hnp.basic_indices(x.shape, allow_newaxis=True, max_dims=6))
    part = x[index]
    return part if type(part) is np.ndarray else x


def _repeated(draw: st.DrawFn, x: AnyArray) -> AnyArray:
    return np.broadcast_to(x, (draw(st.integers(0, 3)), *x.shape))


@st.composite
def arrays(draw: st.DrawFn, drawn_dtypes: st.SearchStrategy[np.dtype[Any]] | None = None) -> AnyArray:
    """Draw an array of any dtype, shape, order, alignment and strides, of arbitrary bytes.

    Strides may be negative, zero or with gaps; some are empty, 0-d, read-only or too large to be packed.

    Parameters
    ----------
    drawn_dtypes : search strategy, optional
        By default `dtypes`.
    """
    dtype = draw(dtypes() if drawn_dtypes is None else drawn_dtypes)
    shape = tuple(draw(st.lists(st.sampled_from((3, 4, 2, 5, 1, 3, 4, 0)), max_size=4)))
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes and draw(st.integers(0, 19)) == 0:
        shape = (-(-LARGE_NBYTES // nbytes), *shape)
        nbytes *= shape[0]
    offset = draw(st.integers(0, 9))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    memory = random.integers(0, 256, offset + nbytes + 1, np.uint8)
    x: AnyArray = np.ndarray(shape, dtype, memory, offset, None, draw(st.sampled_from(("C", "F"))))
    changes = st.sampled_from((_stepped, _turned, _cut, _repeated))
    for change in draw(st.lists(changes, min_size=1, max_size=3)):
        x = change(draw, x)
    return x


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
