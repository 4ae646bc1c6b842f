"""Tensors whose elements lie in one place (`Tensor.expand`): the gradient of a sum is one of them.

Backward passes of models that are split between ranks reduce such gradients in place.
"""

from __future__ import annotations

from typing import Any

from nbparallel.sharing.tensors import tensor_of
from nbparallel.sharing.tensors.bits import AnyArray


def is_repeated(array: AnyArray) -> bool:
    """Return whether elements of an array lie in one place."""
    return 0 in array.strides and array.size > 1


def fill_repeated(tensor: Any, array: AnyArray, total: AnyArray) -> None:
    """Write `total` into a tensor, which `array` views and whose elements lie in one place.

    Raises
    ------
    ValueError
        Some of them would have to differ.
    """
    first = tuple(slice(None if step else 1) for step in array.strides)
    repeated = total.copy()
    repeated[...] = total[first]
    if repeated.tobytes() != total.tobytes():
        raise ValueError(
            f"elements of this tensor of shape {tuple(array.shape)} lie in one place (`expand`), and the "
            "result is not the same for all of them, because another rank's tensor holds different ones: "
            "pass `x.contiguous()`"
        )
    tensor.detach()[first].copy_(tensor_of(total[first]))
