"""Tensors as arrays over the same memory, and back; what has no such memory is refused."""

import subprocess
import sys

import numpy as np
import pytest

from nbparallel.sharing.tensors import (
    array_of,
    as_array,
    bits_name,
    bits_operator,
    describe_extension,
    is_tensor,
    number_kind,
    readable_bits,
    rebuild_extension,
    shown_dtype,
    tensor_of,
)
from tests.sharing.tensors.optional import Exporter, needs_ml_dtypes, needs_torch, torch

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64",
    "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def test_nothing_is_a_tensor_where_torch_is_not_imported():
    """The room asks `sys.modules`, and imports nothing by itself."""
    code = """
import sys, nbparallel.sharing.tensors as t
print(t.is_tensor(1), t.as_array([1]), 'torch' in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.split() == ["False", "None", "False"]


@needs_torch
@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_and_its_array_are_the_same_memory(name):
    """Of every dtype and layout: what one writes the other reads, both ways."""
    dtype = getattr(torch, name)
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    for tensor in (whole, whole[::2, 1::2], whole.t(), whole[1, 1], whole[:0], whole[:, :1]):
        array = as_array(tensor)
        assert array.shape == tuple(tensor.shape)
        assert array.dtype.itemsize == tensor.element_size()
        back = tensor_of(array)
        assert back.dtype == dtype
        assert back.data_ptr() == tensor.data_ptr()
        assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))
        assert is_tensor(tensor)
        assert not is_tensor(array)
        assert shown_dtype(array.dtype) == name
    array_of(whole)[0, 1] = array_of(whole)[1, 1]
    assert whole[0, 1].to(torch.complex64) == whole[1, 1].to(torch.complex64)


@needs_torch
def test_autograd_is_left_out():
    """A parameter is read and written as data; nothing is recorded."""
    x = torch.nn.Parameter(torch.zeros(3))
    array_of(x)[:] = 2
    assert x.tolist() == [2, 2, 2]
    assert x.requires_grad
    y = x * 2
    array_of(y)[:] = 7
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@needs_torch
@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "bool"])
def test_a_tensor_that_was_viewed_can_be_resized(name):
    """What an operation has moved is an ordinary tensor: `Tensor.numpy` would have fixed its memory."""
    x = torch.zeros(3, dtype=getattr(torch, name))
    view = array_of(x)
    assert view.flags.writeable
    x[0] = 1
    assert view[0] == array_of(x)[0]
    assert x.untyped_storage().resizable()
    x.resize_(1000)


def _refused():
    return {
        "to_dense": torch.zeros(3).to_sparse(),
        "to_dense()": torch.eye(3).to_sparse_csr(),
        "device='cpu'": torch.zeros(3, device="meta"),
        "unbind": torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged),
    }


@needs_torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_what_has_no_such_memory_is_refused_with_what_to_do():
    """Sparse, nested, quantised tensors, and those on other devices."""
    refused = _refused()
    refused["dequantize"] = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8)
    for advice, tensor in refused.items():
        with pytest.raises(TypeError) as caught:
            as_array(tensor)
        assert advice in str(caught.value)
        assert "\n" not in str(caught.value)


@needs_torch
def test_what_must_not_be_written_is_read_only():
    """Repeated elements and conjugated views are values only."""
    repeated = array_of(torch.ones(1).expand(4))
    assert repeated.tolist() == [1, 1, 1, 1]
    assert not repeated.flags.writeable
    conjugate = array_of(torch.tensor([1 + 2j]).conj())
    assert conjugate.tolist() == [1 - 2j]
    assert not conjugate.flags.writeable
    assert array_of(torch.ones(1).expand(1)).flags.writeable


@needs_torch
def test_torch_computes_with_elements_that_numpy_lacks():
    """bfloat16 is rounded in every step as torch rounds it; what torch does not compute is a TypeError."""
    a, b = torch.randn(100).bfloat16(), torch.randn(100).bfloat16()
    for function in ("add", "multiply", "minimum", "maximum"):
        x, y = array_of(a.clone()), array_of(b)
        y.flags.writeable = False
        bits_operator(function, "torch.bfloat16")(x, y, x)
        assert torch.equal(tensor_of(x), getattr(torch, function)(a, b))
    assert np.array_equal(readable_bits(array_of(a)), a.float().numpy())
    with pytest.raises(TypeError, match=r"torch does not compute add for torch\.float8_e5m2"):
        bits_operator("add", "torch.float8_e5m2")


def test_what_exports_dlpack_is_taken_for_reading():
    """The same memory, read-only; on another device than the CPU it is refused in one sentence."""
    x = np.arange(6.0).reshape(2, 3)
    view = as_array(Exporter(x))
    x[1, 1] = 50
    assert view[1, 1] == 50
    assert not view.flags.writeable
    with pytest.raises(TypeError, match="another device than the CPU") as caught:
        as_array(Exporter(x, device=2))
    assert "\n" not in str(caught.value)
    assert as_array(np.ma.masked_array(x)) is None
    assert as_array({"x": x}) is None


def test_what_dlpack_cannot_say_comes_by_array():
    """An exporter whose elements DLPack does not know is asked for `__array__`; else it is an object."""

    class Odd(Exporter):
        def __dlpack__(self, **options):
            raise BufferError("no such dtype")

    class Named(Odd):
        def __array__(self, dtype=None, copy=None):
            return self.array

    x = np.arange(3)
    assert as_array(Odd(x)) is None
    found = as_array(Named(x))
    assert found.tolist() == [0, 1, 2]
    assert not found.flags.writeable
    assert x.flags.writeable


@needs_ml_dtypes
def test_dtypes_of_ml_dtypes_are_described_by_name():
    """Each is rebuilt from its description; no other name is looked up."""
    import ml_dtypes

    for name, kind in {"bfloat16": "f", "float8_e4m3fn": "f", "int4": "i", "uint2": "u"}.items():
        dtype = np.dtype(getattr(ml_dtypes, name))
        assert rebuild_extension(describe_extension(dtype)) == dtype
        assert number_kind(dtype) == kind
        assert bits_name(dtype) == ""
    assert describe_extension(np.dtype(float)) == ""
    for other in ("os.system", "ml_dtypes.finfo", "ml_dtypes.nothing", "ml_dtypes._custom_floats", "<f8"):
        assert rebuild_extension(other) is None
