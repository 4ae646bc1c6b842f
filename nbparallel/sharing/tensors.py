"""Tensors and other libraries' arrays as numpy arrays over the same memory, and back.

Nothing here imports torch before the user has: an object is a tensor only if ``sys.modules`` has torch.  Only
`tensor_of` imports it, where a tensor arrives that another process sent.  What stands above this room knows
numpy arrays alone; it asks `as_array` about what is none, and `tensor_of` gives a tensor back.

Tensors are moved into shared memory elsewhere: `sharing.tensor_storage` (whole models, by `move_tensors`);
`session.names.delivery` does so for the notebook's names, and `transfer.tensor_pickling` has what travels.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.errors import with_article

# Elements that torch has and numpy has not (bfloat16, float8 …): in numpy they travel as bits.
#
# Their dtype has one field of unsigned integers, called as torch calls the elements: ``torch.bfloat16``.  So
# it can be described, compared and copied as any dtype, and arrives in a process without torch as well.  What
# is computed with such elements is computed by torch.

AnyArray = npt.NDArray[Any]
PREFIX = "torch."


class _Memory:
    """Memory as an object that numpy makes an array of (its array interface)."""

    def __init__(self, keep: object, interface: dict[str, Any]) -> None:
        self.keep, self.__array_interface__ = keep, interface


def array_at(
    keep: object,
    address: int,
    shape: tuple[int, ...],
    typestr: str = "|u1",
    strides: tuple[int, ...] | None = None,
    *,
    writable: bool = True,
) -> AnyArray:
    """Return an array over memory, as bytes by default, which keeps what the memory belongs to."""
    interface = {
        "data": (address, not writable),
        "shape": shape,
        "typestr": typestr,
        "strides": strides,
        "version": 3,
    }
    return np.asarray(_Memory(keep, interface))


@lru_cache(maxsize=64)
def bits_dtype(name: str, itemsize: int) -> np.dtype[Any]:
    """Return the dtype for elements that torch calls `name`.

    >>> bits_dtype("torch.bfloat16", 2)
    dtype([('torch.bfloat16', '<u2')])
    """
    return np.dtype([(name, f"<u{itemsize}")])


def bits_name(dtype: np.dtype[Any]) -> str:
    """Return what torch calls the elements of such a dtype; empty: it is another one.

    >>> bits_name(bits_dtype("torch.bfloat16", 2)), bits_name(np.dtype(float))
    ('torch.bfloat16', '')
    """
    names = dtype.names
    return names[0] if names is not None and len(names) == 1 and names[0].startswith(PREFIX) else ""


def shown_dtype(dtype: np.dtype[Any]) -> str:
    """Return a dtype as messages name it: bits by the name of their elements."""
    return bits_name(dtype).removeprefix(PREFIX) or str(dtype)


def bits_tensor(array: AnyArray, name: str) -> Any:
    """Return an array of bits as a tensor over the same memory."""
    torch = importlib.import_module("torch")
    if not array.flags.writeable:
        # only going to be read, and said to be writable: torch has no tensors for reading only
        interface = array.__array_interface__
        array = array_at(array, interface["data"][0], array.shape, f"<u{array.itemsize}", array.strides)
    return torch.from_numpy(array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1")).view(
        getattr(torch, name.removeprefix(PREFIX))
    )


def readable_bits(array: AnyArray) -> AnyArray:
    """Return the values of an array of bits as a new array of a dtype of numpy, for messages."""
    torch = importlib.import_module("torch")
    tensor = bits_tensor(array, bits_name(array.dtype))
    values: AnyArray = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32).numpy()
    return values


class BitsOperator:
    """A function of torch on arrays of bits, called as the ufunc of numpy that has the same name.

    Each result is rounded to the elements' own precision, as in torch.

    Parameters
    ----------
    function : str
        Its name in torch and in numpy, such as ``add``.
    name : str
        What torch calls the elements.

    Raises
    ------
    TypeError
        torch has no such function for these elements.
    """

    def __init__(self, function: str, name: str) -> None:
        torch = importlib.import_module("torch")
        self._name = name
        one = torch.empty(1, dtype=getattr(torch, name.removeprefix(PREFIX)))
        try:
            self._function: Callable[..., Any] = getattr(torch, function)
            self._function(one, one, out=one)
        except (RuntimeError, TypeError, AttributeError) as error:  # NotImplementedError is a RuntimeError
            raise TypeError(f"torch does not compute {function} for {name}") from error

    def __call__(self, a: AnyArray, b: AnyArray, out: AnyArray) -> AnyArray:
        """Combine two arrays of one shape into `out`, which may be one of them."""
        name = self._name
        self._function(bits_tensor(a, name), bits_tensor(b, name), out=bits_tensor(out, name))
        return out

    def scale(self, total: AnyArray, factor: float) -> None:
        """Multiply an array by a number in place."""
        bits_tensor(total, self._name).mul_(factor)

    def divide(self, total: AnyArray, count: int) -> AnyArray:
        """Divide an array by a number in place."""
        bits_tensor(total, self._name).div_(count)
        return total


bits_operator = lru_cache(maxsize=64)(BitsOperator)
"""Each function of torch for each kind of elements, made once."""


# The dtypes of the package ml_dtypes (bfloat16, float8, int4 …), which numpy itself cannot describe.

MODULE = "ml_dtypes"
_FORM = re.compile(rf"{MODULE}\.[a-z][a-z0-9_]{{1,40}}")
_KINDS = (("uint", "u"), ("int", "i"), ("bfloat", "f"), ("float", "f"), ("bcomplex", "c"), ("complex", "c"))


def describe_extension(dtype: np.dtype[Any]) -> str:
    """Return how such a dtype is described to another process; empty: it is none of them."""
    kind = dtype.type
    return f"{MODULE}.{kind.__name__}" if kind.__module__ == MODULE else ""


@lru_cache(maxsize=64)
def rebuild_extension(form: str) -> np.dtype[Any] | None:
    """Return the dtype that `describe_extension` described, None if it described none.

    ml_dtypes is imported, which the sender has done already.
    """
    if not _FORM.fullmatch(form):
        return None
    try:
        kind = getattr(importlib.import_module(MODULE), form.removeprefix(f"{MODULE}."), None)
    except ImportError:
        return None
    return np.dtype(kind) if isinstance(kind, type) and issubclass(kind, np.generic) else None


def number_kind(dtype: np.dtype[Any]) -> str:
    """Return the kind of numbers that a dtype holds, as ``dtype.kind`` says it of those of numpy.

    >>> number_kind(np.dtype(float)), number_kind(np.dtype([("torch.bfloat16", "<u2")]))
    ('f', 'f')
    """
    if dtype.kind != "V":
        return dtype.kind
    name = dtype.type.__name__ if dtype.type.__module__ == MODULE else bits_name(dtype).removeprefix(PREFIX)
    return next((kind for start, kind in _KINDS if name.startswith(start)), "V")


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


def is_plain_tensor(x: object) -> bool:
    """Return whether `x` is a tensor of torch itself: a subclass may run the user's code."""
    torch: Any = sys.modules.get("torch")
    plain = getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None)
    return any(type(x) is kind for kind in plain)  # isinstance may call the user's code


def tensor_types() -> tuple[type, ...]:
    """Return the classes of tensors and of modules; none in a process without torch."""
    torch = sys.modules.get("torch")  # while it is being imported it may lack both
    kinds = getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Module", None)
    return tuple(kind for kind in kinds if kind is not None)


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


# Gradients of torch's parameters and modules, where a user passes those and means the gradients.


def _is_of(x: object, name: str) -> bool:
    kind = getattr(sys.modules.get("torch.nn"), name, None)
    return kind is not None and isinstance(x, kind)


def is_module(x: object) -> bool:
    """Return whether `x` is a ``torch.nn.Module``."""
    return _is_of(x, "Module")


def gradient_of(x: Any) -> Any:
    """Return the gradient of a parameter, None if it has none; anything else as it is."""
    return x.grad if _is_of(x, "Parameter") else x


def named_gradients(module: Any) -> dict[str, Any]:
    """Return the gradients of a module's parameters by their names, of those that have one."""
    return {name: x.grad for name, x in module.named_parameters() if x.grad is not None}


def fill_module(module: Any, value: object) -> Any:
    """Give a module the parameters and buffers of another one, as ``load_state_dict`` does; return it.

    Raises
    ------
    TypeError
        `value` is no module.
    RuntimeError
        They differ in names or shapes; torch's message says which.
    """
    if not is_module(value):
        raise TypeError(
            f"{with_article(type(module).__name__)} that is passed takes a module's parameters, and what "
            f"came is of type {type(value).__name__}: pass None to get it as a new value"
        )
    module.load_state_dict(value.state_dict())  # type: ignore[attr-defined]
    return module
