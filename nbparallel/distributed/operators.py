"""Reduction operators.

To add an operator, add a row to `OPERATORS` (and its name to `ReduceOp`); everything else reads the table.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_NUMERIC = "biufcmM"
"""Kinds of dtypes that can be reduced at all."""


class ReduceOp(enum.StrEnum):
    """How `all_reduce` and its relatives combine values; the strings themselves do as well."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One way to combine values; equal to itself alone, which makes it a quick key."""

    name: str
    ufunc: np.ufunc
    """Combines two arrays."""
    pair: Callable[[Any, Any], Any]
    """Combines two numbers of Python or numpy; ints stay exact."""
    finish: Callable[[Any, int], Any] | None = None
    """The last step: ``finish(total, count)`` returns the result, and changes an array in place."""
    kinds: str = _NUMERIC
    """Kinds of dtypes that it accepts."""
    hint: str = ""
    """What an error about another kind says, by the array's ``{dtype}``."""
    inexact_kinds: str = ""
    """Kinds whose last bits depend on the memory layout: every rank must combine them in the same layout."""


def _lesser(a: Any, b: Any) -> Any:
    return a if a != a or (b == b and a <= b) else b  # NaN differs from itself, and wins


def _greater(a: Any, b: Any) -> Any:
    return a if a != a or (b == b and a >= b) else b


def _divide(total: Any, count: int) -> Any:
    total /= count
    return total


OPERATORS = {
    op.name: op
    for op in (
        Operator("sum", np.add, operator.add),
        Operator(
            "avg", np.add, operator.add, finish=_divide, kinds="fc",
            hint="needs floating-point numbers, and this array has dtype {dtype}: use x.astype(float), or "
            "op='sum' and divide",
        ),
        Operator("product", np.multiply, operator.mul, inexact_kinds="c"),  # may be fused, or not
        Operator("min", np.minimum, _lesser),
        Operator("max", np.maximum, _greater),
        Operator("band", np.bitwise_and, operator.and_, kinds="biu"),
        Operator("bor", np.bitwise_or, operator.or_, kinds="biu"),
        Operator("bxor", np.bitwise_xor, operator.xor, kinds="biu"),
    )
}  # fmt: skip


def find_operator(op: object) -> Operator:
    """Return the operator called `op`.

    Raises
    ------
    TypeError
        `op` is not a string.
    ValueError
        There is no such operator; the message lists them.
    """
    if not isinstance(op, str):
        raise TypeError(
            f"op must be a string or a ReduceOp, not {type(op).__name__}: {', '.join(map(repr, OPERATORS))}"
        )
    found = OPERATORS.get(op.lower())
    if found is None:
        raise ValueError(f"there is no operator {str(op)!r}; choose one of {', '.join(map(repr, OPERATORS))}")
    return found


@functools.lru_cache(maxsize=1024)
def check_dtype(op: Operator, dtype: np.dtype[Any]) -> None:
    """Reject a dtype that numpy cannot reduce in place; cached, since asking numpy takes microseconds."""
    if dtype.kind not in op.kinds and op.hint:
        raise TypeError(f"op={op.name!r} " + op.hint.format(dtype=dtype))
    if dtype.kind not in _NUMERIC:
        raise TypeError(f"op={op.name!r} needs numbers, and this array has dtype {dtype}")
    probe = np.empty(0, dtype)
    try:
        op.ufunc(probe, probe, out=probe)
    except TypeError as error:
        raise TypeError(f"op={op.name!r} does not work for arrays of dtype {dtype}") from error


def combine(op: Operator, inputs: Sequence[Any], out: Any) -> None:
    """Combine arrays in rank order into `out`, which is the first of them or none."""
    ufunc, total = op.ufunc, inputs[0]
    for other in inputs[1:]:
        total = ufunc(total, other, out=out)
    if op.finish is not None and len(inputs) > 1:  # dividing by 1 changes complex NaNs
        op.finish(out, len(inputs))
