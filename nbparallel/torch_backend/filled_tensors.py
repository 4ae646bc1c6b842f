"""Tensors that an operation fills: torch checks neither the right to write nor one place per element."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbparallel.distributed.runtime.shared_arrays import is_mapped_read_only
from nbparallel.errors import LET_WRITE, ReadOnlyArrayError
from nbparallel.sharing.tensors import AnyArray, array_of, tensor_of

# Tensors whose elements lie in one place (`Tensor.expand`): the gradient of a sum is one of them.
#
# Backward passes of models that are split between ranks reduce such gradients in place.


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


def filled(tensor: Any, operation: str, *, repeated: bool = False) -> AnyArray:
    """Return the array over a tensor that `operation` fills.

    Parameters
    ----------
    repeated : bool
        Elements may lie in one place; the caller writes them by `fill_repeated`.

    Raises
    ------
    ReadOnlyArrayError
        Writing would end this process, or would be wrong: the message says what to pass.
    """
    array = array_of(tensor)
    if is_mapped_read_only(array):
        raise ReadOnlyArrayError(
            f"{operation} fills this tensor, and this rank may only read its memory, a shared array: "
            f"pass `x.clone()`, or let ranks write to the array with {LET_WRITE}"
        )
    if array.flags.writeable or (repeated and is_repeated(array)):
        return array
    if is_repeated(array):
        cause, instead = "elements of it lie in one place (`expand`)", "x.contiguous()"
    else:
        cause, instead = "it is a conjugated or negated view", "x.resolve_conj().resolve_neg()"
    raise ReadOnlyArrayError(f"{operation} fills this tensor, and {cause}: pass `{instead}`")


def broadcast_operand(tensor: Any) -> Any:
    """Return what to broadcast: the array over a tensor, or the tensor where it cannot be written.

    The operation itself decides then: nothing is written where all ranks pass the same memory.
    """
    array = array_of(tensor)
    return tensor if not array.flags.writeable or is_mapped_read_only(array) else array


def member_rows(whole: AnyArray, part: Any, size: int, operation: str) -> AnyArray:
    """Return one array for all members as a row for each, of the shape of `part`."""
    if whole.size != size * part.numel():
        raise ValueError(
            f"{operation} of {size} ranks needs one tensor with {size} times the {part.numel()} elements of "
            f"the other, and it has {whole.size}"
        )
    rows = whole.reshape(size, *part.shape)
    if rows.size and not np.may_share_memory(rows, whole):
        raise ValueError(
            f"{operation} of {size} ranks cannot see a tensor of strides {_strides(whole)} as {size} rows "
            f"without a copy: pass `x.contiguous()`"
        )
    return rows


def _strides(x: AnyArray) -> tuple[int, ...]:
    """Return strides as torch counts them, in elements."""
    return tuple(step // x.itemsize for step in x.strides)


def each_row(rows: AnyArray) -> list[AnyArray]:
    """Return the rows as arrays that are views, those of no dimension too."""
    return [rows[i, ...] for i in range(len(rows))]
