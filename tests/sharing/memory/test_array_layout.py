"""Layout: bytes that an array touches, and dtypes as plain data."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from nbparallel.errors import InvalidHandleError, ObjectArrayError
from nbparallel.sharing.memory.array_layout import describe_dtype, extent, rebuild_dtype

byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # numpy 1.26 has it elsewhere

SPECIAL = [
    np.dtype([("a", "i1"), ("b", "<f8", (2, 3))], align=True),
    np.dtype([("a", "i4"), ("b", "f4")], align=True),
    np.dtype([("x", np.dtype([("y", "i1"), ("z", "f8")], align=True), (2,))]),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [8, 0], "itemsize": 24}),
    np.dtype({"names": ["a", "b"], "formats": ["i4", ("f8", (2,))], "offsets": [0, 2]}),
    np.dtype([(("a title", "a"), "i4")]),
    np.dtype([("x", [("y", ">f4"), ("z", "M8[D]")])]),
    np.dtype([]),
    np.dtype("M8[25us]"),
    np.dtype("m8"),
    np.dtype(">c16"),
    np.dtype(np.longdouble),
    np.dtype("V7"),
]


@pytest.mark.parametrize("dtype", SPECIAL, ids=str)
def test_special_dtypes_survive_description(dtype):
    """Nested, aligned, overlapping, titled, byte-swapped dtypes come back equal, and aligned as they were."""
    back = rebuild_dtype(describe_dtype(dtype))
    assert back == dtype
    assert repr(back) == repr(dtype), "an equal one may lie in another way"


@pytest.mark.slow
@given(hnp.array_dtypes(allow_subarrays=True) | hnp.scalar_dtypes())
def test_every_dtype_survives_description(dtype):
    """Whatever numpy can make without objects comes back equal."""
    assert rebuild_dtype(describe_dtype(dtype)) == dtype


@pytest.mark.parametrize(
    "dtype", ["O", [("a", "O")], [("a", [("b", "O")])], getattr(np.dtypes, "StringDType", lambda: "O")()]
)
def test_objects_are_refused(dtype):
    """References to Python objects never go into shared memory, however deep they hide."""
    with pytest.raises(ObjectArrayError, match=r"objects|described"):
        describe_dtype(np.dtype(dtype))


@pytest.mark.parametrize(
    "form",
    [
        "O",
        "|O",
        "i4,f8",
        "<i3",
        "<f8 ",
        "<f8\n",
        "float64",
        b"<f8",
        None,
        7,
        [("a", "O")],
        {"names": ["a"], "formats": ["<i4"]},
        describe_dtype(SPECIAL[0])[:-1],
        describe_dtype(SPECIAL[0])[:8],
        "<U9999999999",
        "<M8[1e9s]",
        np.dtype(float),
        float,
    ],
    ids=repr,
)
def test_nothing_else_is_a_dtype(form):
    """What is no description of a dtype without objects is refused, not guessed at."""
    with pytest.raises(InvalidHandleError):
        rebuild_dtype(form)


@pytest.mark.slow
@given(hnp.arrays(np.int16, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)), st.data())
def test_extent_is_what_numpy_says(array, data):
    """First and last byte agree with numpy's own arithmetic, for any view."""
    if array.ndim:
        view = array.transpose(data.draw(st.permutations(range(array.ndim))))
        view = view[data.draw(hnp.basic_indices(view.shape, allow_ellipsis=False))]
    else:
        view = array
    view = np.asarray(view) if not isinstance(view, np.ndarray) else view
    low, high = extent(view.shape, view.strides, view.itemsize)
    address = view.ctypes.data
    if view.size:
        assert (address + low, address + high) == byte_bounds(view)
    else:
        assert (low, high) == (0, 0)
