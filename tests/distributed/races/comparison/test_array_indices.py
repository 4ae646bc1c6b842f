"""Indices of bytes: what is shown for a place takes just the elements that were touched there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from nbparallel.distributed.races.access_log import ArrayName
from nbparallel.distributed.races.array_names import NamedArray
from nbparallel.distributed.races.byte_sets import ByteSet
from tests.distributed.races.comparison.recorded import AnyArray, box_of, bytes_of
from tests.harness.tiers import examples

SHAPES = [(), (1,), (12,), (8, 6), (1, 7), (4, 1, 6), (3, 4, 5)]


def named(segment: AnyArray, array: AnyArray, name: str = "a") -> NamedArray:
    """Return an array with its name."""
    box = box_of(segment, array)
    return NamedArray(ArrayName(name, 1, box.offset, box.shape, box.strides, box.itemsize))


def memory(shape: tuple[int, ...], *, transposed: bool, turned: bool) -> tuple[AnyArray, AnyArray]:
    """Return a segment and an array in it, behind other bytes."""
    segment = np.zeros(8 * int(np.prod(shape)) + 64, np.uint8)
    array = segment[64 : 64 + 8 * int(np.prod(shape))].view(np.float64).reshape(shape)
    array = array.T if transposed else array
    return segment, array[::-1] if turned and array.ndim else array


@st.composite
def views(draw: st.DrawFn) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Draw a segment, an array in it, and a view of that by slices and numbers."""
    shape = draw(st.sampled_from(SHAPES))
    segment, array = memory(shape, transposed=draw(st.booleans()), turned=draw(st.booleans()))
    index: list[Any] = []
    for length in array.shape:
        low = draw(st.integers(0, length - 1))
        step = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
        whole = slice(None, None, step)
        part = slice(low, draw(st.integers(low + 1, length)), abs(step))
        index.append(draw(st.sampled_from([low, whole, part, slice(None)])))
    return segment, array, array[(*index, ...)]


@settings(max_examples=examples(400), deadline=None)
@given(views())
def test_every_slice_is_named(case: tuple[AnyArray, AnyArray, AnyArray]) -> None:
    """A view by slices and numbers is shown as an index that takes the same elements."""
    segment, array, view = case
    if not view.size:
        return
    region = box_of(segment, view)
    found = named(segment, array)
    slices = found.slices(ByteSet(region))
    assert slices is not None
    shown = found.written(slices)
    taken = eval(shown.replace("]", ", ...]"), {"a": array})  # a view, also of a single element
    assert bytes_of(box_of(segment, taken)) == bytes_of(region)


@pytest.mark.parametrize(
    ("shape", "index", "shown"),
    [
        ((16,), np.s_[0:8], "a[0:8]"),
        ((16,), np.s_[1::4], "a[1::4]"),
        ((16,), np.s_[::2], "a[::2]"),
        ((16,), np.s_[1:9:4], "a[1:6:4]"),
        ((16,), np.s_[7:8], "a[7]"),
        ((16,), np.s_[:], "a"),
        ((1,), np.s_[:], "a[0]"),
        ((4, 6), np.s_[1:2, :], "a[1, :]"),
        ((4, 6), np.s_[1:3, :], "a[1:3, :]"),
        ((4, 6), np.s_[:, 2:3], "a[:, 2]"),
        ((4, 6), np.s_[:, ::2], "a[:, ::2]"),
        ((4, 6), np.s_[2:3, 3:4], "a[2, 3]"),
        ((4, 6, 5), np.s_[2:3], "a[2, :]"),
    ],
)
def test_as_users_type_it(shape: tuple[int, ...], index: Any, shown: str) -> None:
    """Slices, steps and rows look as in numpy."""
    array = np.zeros(shape)
    found = named(array, array)
    slices = found.slices(ByteSet(box_of(array, array[index])))
    assert slices is not None
    assert found.written(slices) == shown


def test_a_part_of_an_element() -> None:
    """A field of a structured array, or the imaginary part, is shown as its element."""
    array = np.zeros((3, 4), complex)
    found = named(array, array)
    for view, shown in ((array.imag[1:2], "a[1, :]"), (array.imag[1:2, 3:4], "a[1, 3]")):
        slices = found.slices(ByteSet(box_of(array, view)))
        assert slices is not None
        assert found.written(slices) == shown


def test_no_slices_take_a_diagonal() -> None:
    """It is within the array."""
    array = np.zeros((6, 6))
    diagonal = ByteSet(box_of(array, array[1:4, 1:4].diagonal()))
    assert named(array, array).slices(diagonal) is None
