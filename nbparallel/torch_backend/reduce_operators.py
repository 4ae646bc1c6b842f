"""torch's reduce operators as ours."""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}


def operator_of(reduce_op: Any) -> str:
    """Return our name of an operator.

    Raises
    ------
    ValueError
        There is none: ``PREMUL_SUM`` multiplies first, which gloo does not know either.
    """
    kind = getattr(reduce_op, "op", reduce_op)
    name = _NAMES.get(kind)
    if name is None:
        raise ValueError(f"the backend nbparallel has no {kind}: multiply the tensor first, and use SUM")
    return name
