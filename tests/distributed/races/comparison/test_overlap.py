"""Overlap of places: as looking at each byte finds it, whatever the strides."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings, strategies as st

from nbparallel.distributed.races.access_log import Box, Elements
from nbparallel.distributed.races.byte_sets import ByteSet, find_overlap
from tests.distributed.races.comparison.recorded import box_of, bytes_of, elements
from tests.harness.tiers import examples

AXES = st.lists(st.tuples(st.integers(1, 5), st.integers(-40, 40)), max_size=3)
SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """Draw any box: overlapping rows, negative and zero strides."""
    axes = draw(AXES)
    shape, strides = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    return Box(draw(st.integers(600, 760)), shape, strides, draw(SIZES))


@st.composite
def regular_boxes(draw: st.DrawFn) -> Box:
    """Draw a view of an array, as users take them."""
    array = np.zeros(draw(st.sampled_from([(60,), (8, 8), (4, 5, 6), (64,), (2, 3, 4, 5)])), "V8")
    array = array.T if draw(st.booleans()) else array
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in array.shape]
    steps = [draw(st.sampled_from([1, 1, 2, 3])) for _ in array.shape]
    view = array[
        tuple(slice(low, max(high, low + 1), step) for (low, high), step in zip(bounds, steps, strict=True))
    ]
    if not view.size:
        view = array[:1]
    return box_of(array if array.flags.c_contiguous else array.T, view[::-1] if draw(st.booleans()) else view)


@st.composite
def scattered(draw: st.DrawFn) -> Elements:
    """Draw single elements."""
    size = draw(SIZES)
    return elements(size, draw(st.lists(st.integers(500, 860), min_size=1, max_size=12)))


REGIONS = st.one_of(boxes(), scattered())


def check(one: Box | Elements, other: Box | Elements, *, surely: bool = True) -> None:
    """Compare what is found with all bytes of both."""
    common = bytes_of(one) & bytes_of(other)
    for first, second in ((one, other), (other, one)):
        found = find_overlap(ByteSet(first), ByteSet(second))
        assert common or found is None or not found.certain
        if not common:
            assert not surely or found is None
            continue
        assert found is not None
        assert found.certain or not surely
        assert found.start <= min(common)
        assert max(common) < found.stop
        if found.runs is not None:
            hit = {run for run in found.runs.tolist() if common & set(range(run, run + found.run))}
            assert hit == set(found.runs.tolist())
            assert common <= {run + byte for run in hit for byte in range(found.run)}


@settings(max_examples=examples(300), deadline=None)
@example(Box(600, (3, 3), (10, 14), 2), Box(620, (), (), 2))
@given(REGIONS, REGIONS)
def test_any_two_regions(one: Box | Elements, other: Box | Elements) -> None:
    """Boxes of all strides and single elements of all sizes overlap just where they have bytes in common.

    Of rows that overlap themselves and irregular elements an overlap may be possible only.
    """
    irregular = isinstance(one, Elements) or isinstance(other, Elements)
    check(one, other, surely=not irregular or (ByteSet(one).nested and ByteSet(other).nested))


@settings(max_examples=examples(300), deadline=None)
@given(regular_boxes(), st.one_of(regular_boxes(), scattered()))
def test_views_of_an_array(one: Box, other: Box | Elements) -> None:
    """So do views with steps, of arrays in both orders."""
    check(one, other)


def test_large_views_take_no_memory() -> None:
    """Interleaved columns of ten billion elements are compared by their strides."""

    def columns(first: int) -> ByteSet:
        return ByteSet(Box(first * 8, (100_000, 50_000), (800_000, 16), 8))

    assert find_overlap(columns(0), columns(1)) is None
    assert find_overlap(columns(0), columns(2)) is not None
    assert find_overlap(columns(0), ByteSet(elements(8, [8, 24, 8_000_000_008]))) is None
    assert find_overlap(columns(1), ByteSet(elements(8, [0, 8_000_000_008]))) is not None
