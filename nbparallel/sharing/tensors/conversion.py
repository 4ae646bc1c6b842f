"""A tensor, or what exports DLPack, as an array over the same memory; an array as a tensor."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from nbparallel.errors import with_article
from nbparallel.sharing.tensors.bits import AnyArray, bits_dtype, bits_name, bits_tensor

_NO_ARRAYS = frozenset({int, float, complex, bool, str, bytes, type(None), list, tuple, dict})
"""What is sent most often beside arrays, and needs no further look."""
_ON_CPU = frozenset({1, 3, 11, 13})
"""DLPack's numbers of devices whose memory the CPU reads: CPU, pinned memory of CUDA and ROCm, managed."""


_WRITABLE = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""Whether what numpy takes by DLPack can be written."""


def is_tensor(x: object) -> bool:
    """Return whether `x` is a tensor of torch; False, at no cost, in a process without torch."""
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)  # a module that is being imported may lack it
    return kind is not None and isinstance(x, kind)


def as_array(x: Any) -> AnyArray | None:
    """Return an array over the memory of what is no array of numpy but holds numbers, else None.

    Parameters
    ----------
    x : object
        A tensor, or what exports DLPack (an array of JAX), which numpy reads only.

    Raises
    ------
    TypeError
        Its numbers do not lie in this machine's memory as an array does: the message says what to do.
    """
    if type(x) in _NO_ARRAYS:
        return None
    if is_tensor(x):
        return array_of(x)
    if hasattr(type(x), "__dlpack__") and not isinstance(x, np.ndarray):
        return _from_dlpack(x)
    return None


def array_of(tensor: Any) -> AnyArray:
    """Return a dense tensor of the CPU as an array over the same memory; autograd knows nothing of it.

    Elements that numpy lacks become bits (`bits`).  The array is read-only where writing would be wrong: a
    tensor that repeats its elements (`expand`); a conjugated view, of which it is a copy.

    Raises
    ------
    TypeError
        It is sparse, quantised, nested, without data or on another device: the message says what to do.
    """
    plain = type(tensor) is sys.modules["torch"].Tensor and not tensor.requires_grad
    detached = tensor if plain else tensor.detach()
    refused: Exception | None = None
    try:
        array = _view(detached)
    except (TypeError, RuntimeError, BufferError) as error:
        refused = error
    if refused is not None:  # behind the handler: a message of numpy above ours would say what is not meant
        return _view_other(detached, refused)
    strides = array.strides
    if (
        0 in strides
        and array.size
        and any(n > 1 and not s for n, s in zip(array.shape, strides, strict=True))
    ):
        array.flags.writeable = False
    return array


class _Exporter:
    """A tensor for `numpy.from_dlpack`, without torch's checks of streams, which cost most of the time."""

    __slots__ = ("_export", "_tensor")

    def __init__(self, export: Callable[[Any], Any], tensor: Any) -> None:
        self._export, self._tensor = export, tensor

    def __dlpack__(self, **_: object) -> Any:
        return self._export(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _view(tensor: Any) -> AnyArray:
    """Return what numpy can view, by DLPack: after `Tensor.numpy` torch never resizes the memory again.

    torch's FullyShardedDataParallel resizes what it has sent.
    """
    torch = sys.modules["torch"]
    export = getattr(torch._C, "_to_dlpack_versioned", None) if _WRITABLE else None
    if export is None or type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
        array: AnyArray = tensor.numpy()
        return array
    return np.from_dlpack(_Exporter(export, tensor))


def _view_other(tensor: Any, error: Exception) -> AnyArray:
    """Return a tensor that `Tensor.numpy` refuses as an array, or raise with what to do."""
    torch = importlib.import_module("torch")
    kind, device = type(tensor).__name__, tensor.device
    if tensor.is_nested:
        raise TypeError("this tensor is nested, and has no single shape: pass the tensors of `x.unbind()`")
    if tensor.is_quantized:
        raise TypeError(
            f"this tensor is quantised ({tensor.dtype}): pass `x.dequantize()`, or its integers, "
            "`x.int_repr()`"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"this tensor is sparse ({tensor.layout}): pass `x.to_dense()`")
    if device.type == "meta":
        raise TypeError(
            "this tensor is on the device 'meta', and has a shape but no data: make one with data first, "
            "such as `torch.empty_like(x, device='cpu')`"
        )
    if device.type != "cpu":
        raise TypeError(
            f"this tensor is on the device {str(device)!r}, and ranks share the memory of the CPU: pass "
            "`x.cpu()`, and copy what comes back with `x.copy_(…)`"
        )
    if tensor.is_conj() or tensor.is_neg():
        array = array_of(tensor.resolve_conj().resolve_neg())
        array.flags.writeable = False
        return array
    itemsize = tensor.element_size()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(itemsize)
    try:
        plain = _view(tensor.view(bits))
    except (TypeError, RuntimeError, BufferError):
        raise TypeError(
            f"{with_article(kind)} of {tensor.dtype} is not taken: {error}. Pass a plain tensor of a dtype "
            "of numpy"
        ) from error
    view: AnyArray = plain.view(bits_dtype(str(tensor.dtype), itemsize))
    return view


def tensor_of(array: AnyArray) -> Any:
    """Return an array as a tensor over the same memory; bits become elements of torch again.

    torch is imported if this process has not done it yet.

    Parameters
    ----------
    array : array
        Writable: torch has no tensors for reading only.
    """
    name = bits_name(array.dtype)
    return bits_tensor(array, name) if name else importlib.import_module("torch").from_numpy(array)


def _from_dlpack(x: Any) -> AnyArray | None:
    """Return what exports DLPack as an array for reading only; None: it is no array of numbers."""
    device = getattr(x, "__dlpack_device__", None)
    place = device() if device is not None else (1, 0)
    if place[0] not in _ON_CPU:
        raise TypeError(
            f"this {type(x).__name__} is on another device than the CPU (DLPack's number {int(place[0])}), "
            "and ranks share the memory of the CPU: pass a copy of it that is there"
        )
    try:
        view = np.from_dlpack(x).view()
    except (TypeError, ValueError, RuntimeError, BufferError):
        if not hasattr(type(x), "__array__"):  # of elements that DLPack, or numpy's part of it, does not know
            return None
        view = np.asarray(x).view()
    view.flags.writeable = False
    return view
