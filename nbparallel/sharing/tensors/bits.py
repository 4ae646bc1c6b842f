"""Elements that torch has and numpy has not (bfloat16, float8 …): in numpy they travel as bits.

Their dtype has one field of unsigned integers, called as torch calls the elements: ``torch.bfloat16``.  So it
can be described, compared and copied as any dtype, and arrives in a process without torch as well.  What is
computed with such elements is computed by torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
PREFIX = "torch."


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
        array = np.asarray(_Readable(array))
    return torch.from_numpy(array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1")).view(
        getattr(torch, name.removeprefix(PREFIX))
    )


class _Readable:
    """Memory that is only going to be read, said to be writable: torch has no tensors for reading only."""

    def __init__(self, array: AnyArray) -> None:
        self.keep = array
        self.__array_interface__ = {
            "data": (array.__array_interface__["data"][0], False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"<u{array.itemsize}",
            "version": 3,
        }


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


@lru_cache(maxsize=64)
def bits_operator(function: str, name: str) -> BitsOperator:
    """Return the function of torch for elements that it calls `name`; errors as `BitsOperator`."""
    return BitsOperator(function, name)
