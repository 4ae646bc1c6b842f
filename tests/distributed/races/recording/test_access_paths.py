"""Every way through numpy to the memory of an array is in one table: a numpy that adds one fails here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.races import checked_cell, numpy_functions
from nbparallel.distributed.races.numpy_functions import EFFECTS
from nbparallel.distributed.races.traced_array import TracedArray, trace
from tests.distributed.races.recording.recorded_memory import POSSIBLE, READ, WRITE, touched_by


def _names(text: str) -> set[str]:
    return set(text.split())


UFUNC_METHODS = _names(
    """
    __abs__ __add__ __and__ __divmod__ __floordiv__ __ge__ __gt__ __iadd__ __iand__ __ifloordiv__
    __ilshift__ __imatmul__ __imod__ __imul__ __invert__ __ior__ __ipow__ __irshift__ __isub__
    __itruediv__ __ixor__ __le__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __neg__ __or__ __pos__
    __pow__ __radd__ __rand__ __rdivmod__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__
    __ror__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __sub__ __truediv__ __xor__
    all any clip conj conjugate max mean min prod ptp std sum var __contains__
    """
)
"""Seen as calls of ufuncs."""
ITEMS = _names(
    """
    __getitem__ __setitem__ __iter__ __array_ufunc__ __array_function__
    """
)
"""Seen by the class itself; iteration takes items."""
NO_ACCESS = _names(
    """
    __array_finalize__ __array_namespace__ __array_priority__ __array_wrap__ __class__ __class_getitem__
    __delattr__ __delitem__ __dir__ __dlpack_device__ __doc__ __getattribute__ __getstate__ __hash__
    T __init__ __init_subclass__ __len__ __new__ __setattr__ __sizeof__ __subclasshook__ device dtype
    flags itemsize nbytes ndim setflags shape size strides __module__ __dict__ __annotations__
    __weakref__ _set_dtype _set_shape base mT __eq__ __ne__
    """
)
"""Shape, dtype and place."""
UNSEEN = {
    "__setstate__": "replaces the memory",
    "broadcast": "iterates without asking; Cython compares the size of the class: it cannot be replaced",
    "resize": "refuses memory that is not its own",
    "itemset": "numpy 1.26 has it",
    "setfield": "writes by offset what fields are for",
}
"""In the docs."""


@pytest.mark.slow
def test_every_attribute_of_arrays_is_seen_a_door_a_view_or_in_the_docs() -> None:
    """No attribute of `numpy.ndarray` is unknown: a numpy with a new one fails here."""
    ours = {
        *numpy_functions.READING, *numpy_functions.VIEWS, *numpy_functions.WRITING,
        *numpy_functions.EXPOSING, *_names("flat item view real imag"),
    }  # fmt: skip
    known = {*ours, *UFUNC_METHODS, *ITEMS, *NO_ACCESS, *UNSEEN}
    assert set(dir(np.ndarray)) - known == set()
    for name in ours & set(dir(np.ndarray)):
        assert getattr(TracedArray, name) is not getattr(np.ndarray, name), name


GENERIC = _names(
    """
    allclose angle append argmax argmin argpartition argsort argwhere around array_equal array_equiv
    astype atleast_1d atleast_2d atleast_3d average bincount block broadcast_arrays busday_count
    busday_offset clip column_stack concat concatenate convolve copy corrcoef correlate count_nonzero
    cov cross cumprod cumsum cumulative_prod cumulative_sum datetime_as_string delete diag diagflat diff
    digitize dot dsplit dstack ediff1d einsum fix flatnonzero geomspace gradient histogram histogram2d
    histogram_bin_edges histogramdd hstack i0 inner insert interp intersect1d is_busday isclose
    iscomplex isin isneginf isposinf isreal ix_ kron lexsort linspace logspace meshgrid nan_to_num
    nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmin nanprod nanstd nansum nanvar nonzero
    outer packbits pad partition piecewise poly polyadd polyder polydiv polyfit polyint polymul polysub
    polyval ptp ravel_multi_index repeat resize roll roots round save savetxt savez savez_compressed
    searchsorted setdiff1d setxor1d sinc sort sort_complex stack tensordot tile trapezoid union1d unique
    unique_all unique_counts unique_inverse unique_values unpackbits unravel_index unwrap vander vdot
    vstack in1d msort product cumproduct trapz row_stack round_ asfarray
    array2string array_repr array_str choose compress select trace where
    """
)
"""Read all arrays that they are passed, and write `out` only."""
VIEWING = _names(
    """
    array_split broadcast_to diagonal dsplit expand_dims flip fliplr flipud hsplit imag matrix_transpose
    moveaxis permute_dims ravel real reshape rollaxis rot90 split squeeze swapaxes transpose unstack
    vsplit
    """
)
"""Return views."""


def test_every_function_of_numpy_that_asks_arrays_is_in_a_table() -> None:
    """No function that goes through ``__array_function__`` is unknown: it may write into an argument."""
    dispatched = type(np.sum)
    names = {name for name in dir(np) if isinstance(getattr(np, name), dispatched)}
    known = {
        *GENERIC, *VIEWING, *EFFECTS, *numpy_functions.METADATA, *numpy_functions.COMPOSED,
        *numpy_functions.READ_AND_VIEW, *numpy_functions.IN_PLACE,
    }  # fmt: skip
    assert names - known == set()


OTHER = _names(
    """
    arange bartlett blackman base_repr binary_repr bool broadcast_shapes busdaycalendar datetime_data
    diag_indices dtype empty errstate eye finfo flatiter format_float_positional format_float_scientific
    frompyfunc full generic get_include get_printoptions getbufsize geterr geterrcall hamming hanning
    identity iinfo indices info isdtype isfortran isscalar issubdtype iterable kaiser load loadtxt
    mask_indices memmap mintypecode ndarray ndindex ones poly1d printoptions promote_types recarray
    record set_printoptions setbufsize seterr seterrcall show_config show_runtime test tri tril_indices
    triu_indices typename ufunc zeros fromfile fromfunction fromiter fromregex fromstring genfromtxt
    issctype maximum_sctype obj2sctype sctype2char issubclass_ issubsctype deprecate byte_bounds
    safe_eval source lookfor who set_string_function set_numeric_ops cast disp compat array2string
    recfromcsv recfromtxt compare_chararrays find_common_type add_docstring add_newdoc add_newdoc_ufunc
    deprecate_with_doc sctypes nbytes DataSource chararray require asfarray row_stack matrix
    """
)
"""Make arrays, or do not touch them; those of text and files take items."""
COMPOSED = _names(
    """
    asmatrix bmat vectorize ndenumerate float16 fix
    """
)
"""Go through a door, or a view of another class, which is one."""


def test_every_other_function_of_numpy_is_a_door_or_touches_no_array() -> None:
    """A function that takes arrays and asks nobody would be unseen: a numpy with a new one fails here."""
    names = set()
    for name in dir(np):
        value = getattr(np, name)
        scalar = isinstance(value, type) and issubclass(value, np.generic)
        if callable(value) and not name.startswith("_") and not isinstance(value, np.ufunc | type(np.sum)):
            names |= set() if scalar or (isinstance(value, type) and issubclass(value, Warning)) else {name}
    known = {
        *OTHER,
        *COMPOSED,
        *checked_cell.CONVERTING,
        *checked_cell.EXPOSING,
        *checked_cell.ITERATING,
        *UNSEEN,
    }
    assert names - known == set()


DOORS: dict[str, Any] = {
    "frombuffer": lambda x: np.frombuffer(x),
    "from_dlpack": lambda x: np.from_dlpack(x),
    "data": lambda x: x.data,
    "ctypes": lambda x: x.ctypes.data,
    "__array_interface__": lambda x: x.__array_interface__,
    "__array__": lambda x: x.__array__(),
    "matrix": lambda x: x.view(np.matrix),
    "recarray": lambda x: x.view(np.recarray),
}


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of np.matrix
@pytest.mark.parametrize("name", DOORS)
def test_doors_may_read_and_write_until_the_cell_ends(name: str) -> None:
    """Who gets the memory itself may read it, and write it if it is writeable."""
    x = np.arange(6.0)
    found = touched_by(x[2:4], lambda t: DOORS[name](t))
    assert found == {READ | WRITE | POSSIBLE: set(range(16))}
    x.flags.writeable = False
    if name != "from_dlpack":  # numpy does not give away what is read-only
        assert touched_by(x[2:4], lambda t: DOORS[name](t)) == {READ | POSSIBLE: set(range(16))}


READ_WHOLE: dict[str, Any] = {
    "tobytes": lambda x: x.tobytes(),
    "dumps": lambda x: x.dumps(),
    "bytes": lambda x: bytes(x),
    "vectorize": lambda x: np.vectorize(lambda a: a + 1)(x),
    "ndenumerate": lambda x: list(np.ndenumerate(x)),
    "pickle": lambda x: __import__("pickle").dumps(x),
    "pickle 5": lambda x: __import__("pickle").dumps(x, 5, buffer_callback=lambda b: None),
    "copy": lambda x: __import__("copy").copy(x),
    "deepcopy": lambda x: __import__("copy").deepcopy([x]),
    "json": lambda x: __import__("json").dumps(x.tolist()),
    "math": lambda x: __import__("math").fsum(x),
    "sorted": lambda x: sorted(x),
    "ascontiguous": lambda x: np.ascontiguousarray(x[::-1]),
    "fft": lambda x: np.fft.fft(x),
    "norm": lambda x: np.linalg.norm(x),
    "ravel": lambda x: x[::-1].flatten(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_WHOLE)
def test_what_copies_an_array_reads_all_of_it(name: str) -> None:
    """However it is copied, and to what."""
    assert touched_by(np.arange(6.0)[2:4], READ_WHOLE[name]) == {READ: set(range(16))}


def test_a_kept_traced_array_is_a_plain_one_after_the_cell() -> None:
    """Outside a checked cell nothing is recorded, and everything works."""
    x = trace(np.arange(12.0).reshape(3, 4))
    x[1] += 1
    x[[0, 1], [1, 2]] = 5
    assert x[0, 1] == 5
    assert type(x[[0, 1]]) is np.ndarray
    assert (repr(x[0]), str(x.T[0]), f"{x[0, 0]}") == ("array([0., 5., 2., 3.])", "[0. 5. 8.]", "0.0")
    assert x.flat[1] == np.sum(x[0, 1]) == x.max(where=x < 6, initial=0) == 5
    x.sort(axis=0)
    np.copyto(x, 1, where=x > 3)
    assert isinstance(x, np.ndarray)
