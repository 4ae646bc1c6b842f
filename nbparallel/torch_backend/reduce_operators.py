"""torch's reduce operators as ours."""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp

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
