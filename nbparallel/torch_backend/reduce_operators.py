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


def operator_of(reduce_op: Any) -> tuple[str, Any]:
    """Return our name of an operator, and the factor of ``PREMUL_SUM``, else None."""
    kind = getattr(reduce_op, "op", reduce_op)
    name = _NAMES.get(kind)
    if name is not None:
        return name, None
    if kind == ReduceOp.PREMUL_SUM:
        _, factor = reduce_op.__getstate__()
        return "sum", factor
    raise ValueError(f"the backend nbparallel has no operator {kind}")
