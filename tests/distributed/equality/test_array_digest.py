"""Digests of arrays and objects: equal for equal data in any layout, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbparallel.distributed.equality.difference import (
    CHUNK,
    Differences,
    checksums,
    chunk_of,
    comparable,
    digest_of,
    flatten,
)
from tests.harness.tiers import examples


@given(st.sampled_from(["f2", "f4", ">f8", "g", "c8", "G"]), st.integers(1, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60), deadline=None)
def test_bytes_and_values(dtype: str, n: int, seed: int) -> None:
    """Comparable bytes differ exactly where values do: NaNs are equal, zeros by sign, gaps do not count."""
    rng = np.random.default_rng(seed)
    x = np.frombuffer(rng.bytes(n * np.dtype(dtype).itemsize), dtype)
    if dtype in "gG":  # not every bit pattern is a number
        x = rng.normal(size=n).astype(dtype)
    y = x.copy()
    y[rng.random(n) < 0.3] = rng.choice([np.nan, -np.nan, 0.0, -0.0, 1.0])
    parts_x, parts_y = (a.view(a.real.dtype).reshape(n, -1) for a in (x, y))
    with np.errstate(invalid="ignore"):
        same = (parts_x == parts_y) & (np.signbit(parts_x) == np.signbit(parts_y))
        same |= np.isnan(parts_x) & np.isnan(parts_y)
    want = ~same.all(axis=1)
    assert ((comparable(x) != comparable(y)).any(axis=1) == want).all()
    found = Differences()
    found.add(0, x, y)
    assert found.count == want.sum()
    assert (checksums(x, exact=False) == checksums(y, exact=False)) == (not want.any())
    packed = np.zeros(n, [("a", "i1"), ("b", dtype, (2,))])
    gaps = np.zeros(n, np.dtype([("a", "i1"), ("b", dtype, (2,))], align=True))
    gaps.view(np.uint8)[...] = 0xAB
    for array in (packed, gaps):
        array["a"], array["b"] = 1, x[:, None]
    assert (comparable(packed) == comparable(gaps)).all()


def test_every_number_counts() -> None:
    """A change of any one element of a large array is found, at its place, whatever the layout."""
    x = np.zeros((700, 600))
    for layout in (x, np.asfortranarray(x), np.zeros((700, 1200))[:, ::2], x[::-1, ::-1]):
        y = layout.copy(order="K")
        y[513, 77] = 1
        assert checksums(x, exact=True) == checksums(layout, exact=True)
        assert checksums(x, exact=True) != checksums(y, exact=True)
        place = 513 * 600 + 77
        number, rest = divmod(place, CHUNK // 8)
        assert chunk_of(y, number)[rest] == 1


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.booleans(),
        lambda part: (
            st.lists(part) | st.dictionaries(st.text() | st.integers(), part) | st.tuples(part, part)
        ),
        max_leaves=10,
    ),
    st.randoms(),
)
@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
def test_copies_are_the_same(x: Any, random: Any) -> None:
    """A copy with its dicts in another order has the same digest, and one part more has not."""

    def copy(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(copy(part) for part in value)
        if isinstance(value, dict):
            pairs = [(key, copy(part)) for key, part in value.items()]
            random.shuffle(pairs)
            return dict(pairs)
        return value

    for exact in (True, False):
        digest = digest_of(flatten(x, exact=exact))
        assert digest == digest_of(flatten(copy(x), exact=exact))
        assert digest != digest_of(flatten([x], exact=exact))
