"""Overlap of places: as looking at each byte finds it, whatever the strides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbparallel.distributed.races import byte_sets as overlap_module
from nbparallel.distributed.races.access_log import Box, Elements
from nbparallel.distributed.races.byte_sets import ByteSet, find_overlap, have_gap
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


@settings(max_examples=examples(300), deadline=None)
@given(boxes(), boxes())
def test_what_numpy_finds_too_hard(one: Box, other: Box) -> None:
    """An overlap is then possible, and none is missed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_module, "MAX_WORK", 1)
        check(one, other, surely=False)


@settings(max_examples=examples(300), deadline=None)
@example(Box(600, (2, 2), (16, 64), 8))
@example(Box(600, (3, 2), (-16, 32), 8))
@given(REGIONS)
def test_bytes_of_a_region(region: Box | Elements) -> None:
    """Joining runs keeps all bytes and adds none; the ends are those of the first and the last byte."""
    found, touched = ByteSet(region), bytes_of(region)
    assert (found.start, found.stop) == (min(touched), max(touched) + 1)
    assert not found.is_solid or len(touched) == found.run == found.stop - found.start
    assert found.is_solid or isinstance(region, Elements) or len(touched) < found.stop - found.start
    if found.nested:
        limits = np.arange(found.start - 3, found.stop + 3)
        last = found.last_runs(limits)
        assert set(limits[(last >= 0) & (last + found.run > limits)].tolist()) == touched


@settings(max_examples=examples(300), deadline=None)
@given(boxes(), boxes())
def test_a_gap_is_never_claimed_wrongly(one: Box, other: Box) -> None:
    """What repeats at a distance is taken for separate only if it is."""
    if have_gap(ByteSet(one), ByteSet(other)):
        assert not bytes_of(one) & bytes_of(other)


def test_large_views_take_no_memory() -> None:
    """Interleaved columns of ten billion elements are compared by their strides."""

    def columns(first: int) -> ByteSet:
        return ByteSet(Box(first * 8, (100_000, 50_000), (800_000, 16), 8))

    assert find_overlap(columns(0), columns(1)) is None
    assert find_overlap(columns(0), columns(2)) is not None
    assert find_overlap(columns(0), ByteSet(elements(8, [8, 24, 8_000_000_008]))) is None
    assert find_overlap(columns(1), ByteSet(elements(8, [0, 8_000_000_008]))) is not None


def test_elements_within_a_solid_box() -> None:
    """A row that is taken by a list of rows is what both touch, not all rows that the other rank wrote."""
    rows = ByteSet(Box(0, (4, 8), (64, 8), 8))
    some = ByteSet(elements(8, [*range(0, 64, 8), *range(448, 768, 8)]))
    for found in (find_overlap(rows, some), find_overlap(some, rows)):
        assert found is not None
        assert found.runs is not None
        assert (found.start, found.stop, found.runs.tolist(), found.run) == (0, 64, list(range(0, 64, 8)), 8)
    assert find_overlap(ByteSet(Box(64, (4, 8), (64, 8), 8)), some) is None
    assert find_overlap(ByteSet(Box(60, (1,), (1,), 1)), some) is not None
