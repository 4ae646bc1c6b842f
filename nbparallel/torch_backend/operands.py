"""Operands of torch as ours: tensors that an operation fills, operators, sparse tensors, forms of calls.

torch checks neither the right to write nor one place per element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp, ReduceOptions, Work

from nbparallel.distributed import Communicator
from nbparallel.distributed.runtime.shared_arrays import is_mapped_read_only
from nbparallel.errors import LET_WRITE, ReadOnlyArrayError
from nbparallel.sharing.tensors import AnyArray, array_of, tensor_of

# Tensors whose elements lie in one place (`Tensor.expand`): the gradient of a sum is one of them.
#
# Backward passes of models that are split between ranks reduce such gradients in place.


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
    is_repeated = 0 in array.strides and array.size > 1
    if array.flags.writeable or (repeated and is_repeated):
        return array
    if is_repeated:
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
        strides = tuple(step // whole.itemsize for step in whole.strides)  # in elements, as torch has them
        raise ValueError(
            f"{operation} of {size} ranks cannot see a tensor of strides {strides} as {size} rows "
            f"without a copy: pass `x.contiguous()`"
        )
    return rows


def each_row(rows: AnyArray) -> list[AnyArray]:
    """Return the rows as arrays that are views, those of no dimension too."""
    return [rows[i, ...] for i in range(len(rows))]


# Reduce operators of torch as ours.

_NAMES = {
    int(ReduceOp.SUM): "sum",
    int(ReduceOp.AVG): "avg",
    int(ReduceOp.PRODUCT): "product",
    int(ReduceOp.MIN): "min",
    int(ReduceOp.MAX): "max",
    int(ReduceOp.BAND): "band",
    int(ReduceOp.BOR): "bor",
    int(ReduceOp.BXOR): "bxor",
}
"""By number: to compare two of torch's enumeration takes half a microsecond."""


def operator_of(reduce_op: Any) -> str:
    """Return our name of an operator.

    Raises
    ------
    ValueError
        There is none: ``PREMUL_SUM`` multiplies first, which gloo does not know either.
    """
    kind = getattr(reduce_op, "op", reduce_op)
    name = _NAMES.get(int(kind))
    if name is None:
        raise ValueError(f"the backend nbparallel has no {kind}: multiply the tensor first, and use SUM")
    return name


# The sum of sparse tensors: what torch's backends can reduce of them.


def sum_sparse(communicator: Communicator, tensor: Any, operator: str, options: dict[str, Any]) -> None:
    """Fill a sparse tensor with the sum of all members'; each may have another number of elements.

    Raises
    ------
    ValueError
        Another operator: of what is not stored, a minimum cannot be known.
    """
    if operator != "sum":
        raise ValueError(
            f"sparse tensors can be summed only, and the operator is {operator}: pass x.to_dense()"
        )
    mine = tensor.detach().coalesce()
    indices = communicator.all_gather(array_of(mine.indices()), **options)
    values = communicator.all_gather(array_of(mine.values()), **options)
    total = torch.zeros_like(mine)
    for index, value in zip(indices, values, strict=True):
        total += torch.sparse_coo_tensor(
            tensor_of(index), tensor_of(value), mine.shape, check_invariants=False
        )
    with torch.no_grad():  # `detach` would be another tensor, whose elements alone were replaced
        tensor.copy_(total.coalesce())


# The forms in which torch's group object is called: lists and options, or what a person writes.

_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def one_tensor(count: int, *further: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Give an operation torch's form for users too: tensors without a list around them, ``allreduce(x, op)``.

    Its own form has `count` lists, one for each tensor of a call, and options; more than one tensor is
    refused, since backends differ in what that means.  `further` are the arguments after the tensors.
    """

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        name = method.__name__

        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Work:
            values, rest = args[:count], args[count:]
            if any(isinstance(value, torch.Tensor) for value in values):
                values = tuple([value] for value in values)
            for value in values:
                if len(value) > 1:
                    raise ValueError(f"{name} takes one tensor in a call, not {len(value)}: call it for each")
            if named or (rest and not hasattr(rest[0], "timeout")):
                given = dict(zip((*further, "timeout"), rest, strict=False), **named)
                rest = (given.pop("opts", None) or ReduceOptions(),)
                for key, option in given.items():
                    if option is not None:
                        setattr(rest[0], _OPTIONS[key], option)
            return method(self, *values, *rest)

        return call

    return decorate
