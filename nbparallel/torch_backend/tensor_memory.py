"""The memory of tensors as arrays, and the reductions of dtypes that numpy lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nbparallel.distributed.operators import ReduceOp as Operators

Array = np.ndarray[Any, Any]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_WITHOUT_NUMPY = frozenset(
    getattr(torch, name)
    for name in (
        "bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)  # fmt: skip


def has_numpy(tensor: Any) -> bool:
    """Whether numpy has the dtype of a tensor."""
    return tensor.dtype not in _WITHOUT_NUMPY


def as_array(tensor: Any) -> Array:
    """Return the memory of a CPU tensor as an array; nothing is copied.

    dtypes that numpy lacks come as integers of the same size: as bits.

    Raises
    ------
    ValueError, TypeError
        The tensor is on another device, or has no memory of that kind (sparse, quantised, meta).
    """
    try:
        array: Array = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        return _as_bits(tensor, error)
    return array


def _as_bits(tensor: Any, error: Exception) -> Array:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"the backend nbparallel moves CPU tensors, and this one is on {tensor.device}: pass "
            "tensor.cpu(), or use a backend of that device"
        ) from None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in _WITHOUT_NUMPY:
        kind = str(tensor.layout).removeprefix("torch.") if tensor.layout is not torch.strided else ""
        shown = kind or ("quantised" if tensor.is_quantized else str(tensor.dtype))
        raise TypeError(
            f"the backend nbparallel moves dense tensors, not {shown} ones ({error}): pass tensor.to_dense() "
            "or its parts"
        ) from None
    bits: Array = tensor.detach().view(_BITS[tensor.element_size()]).numpy()
    return bits


def reduce_bits(tensor: Any, parts: Sequence[Array], operator: str) -> None:
    """Fill a tensor whose dtype numpy lacks with the combination of all ranks' bits, in rank order."""
    values = [torch.from_numpy(np.ascontiguousarray(part)).view(tensor.dtype) for part in parts]
    total = values[0].clone()
    for value in values[1:]:
        if operator in (Operators.SUM, Operators.AVG):
            total.add_(value)
        elif operator == Operators.PRODUCT:
            total.mul_(value)
        elif operator == Operators.MIN:
            total = torch.minimum(total, value)
        elif operator == Operators.MAX:
            total = torch.maximum(total, value)
        else:
            raise TypeError(f"{operator} combines bits of integers, and the tensors are {tensor.dtype}")
    if operator == Operators.AVG:
        total.div_(len(values))
    tensor.detach().copy_(total.view(tensor.shape))
