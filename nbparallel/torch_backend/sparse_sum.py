"""The sum of sparse tensors: what torch's backends can reduce of them."""

from __future__ import annotations

from typing import Any

import torch

from nbparallel.distributed import Communicator
from nbparallel.sharing.tensors import array_of, tensor_of


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
