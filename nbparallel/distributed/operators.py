"""Reduction operators, for arrays and for numbers."""

from __future__ import annotations

import enum
import functools
import marshal
import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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


@dataclass(frozen=True, slots=True)
class Operator:
    """One way to combine two values."""

    name: str
    ufunc: np.ufunc
    pair: Callable[[Any, Any], Any]
    """The same for numbers of Python and numpy."""


def _lesser(a: Any, b: Any) -> Any:
    return a if a != a or (b == b and a <= b) else b  # NaN is not itself, and wins


def _greater(a: Any, b: Any) -> Any:
    return a if a != a or (b == b and a >= b) else b


OPERATORS = {
    op.name: op
    for op in (
        Operator("sum", np.add, operator.add),
        Operator("avg", np.add, operator.add),
        Operator("product", np.multiply, operator.mul),
        Operator("min", np.minimum, _lesser),
        Operator("max", np.maximum, _greater),
        Operator("band", np.bitwise_and, operator.and_),
        Operator("bor", np.bitwise_or, operator.or_),
        Operator("bxor", np.bitwise_xor, operator.xor),
    )
}
BITWISE = ("band", "bor", "bxor")


def find_operator(op: object) -> Operator:
    """Return the operator called `op`.

    Raises
    ------
    TypeError
        `op` is no string.
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
    """Refuse what numpy cannot reduce in place; what it can is remembered: asking takes microseconds."""
    if op.name == "avg" and dtype.kind not in "fc":
        raise TypeError(
            f"op='avg' needs floating-point numbers, and this array has dtype {dtype}: use x.astype(float), "
            "or op='sum' and divide"
        )
    if dtype.kind not in "biufcmM":
        raise TypeError(f"op={op.name!r} needs numbers, and this array has dtype {dtype}")
    probe = np.empty(0, dtype)
    try:
        op.ufunc(probe, probe, out=probe)
    except TypeError as error:
        raise TypeError(f"op={op.name!r} does not work for arrays of dtype {dtype}") from error


def is_number(x: object) -> bool:
    """Whether `x` is a number of Python or numpy."""
    return isinstance(x, int | float | complex | np.number | np.bool_)


def check_number(op: Operator, x: Any) -> Any:
    """Return the number as it enters the operation: a bool counts as an int."""
    if isinstance(x, bool | np.bool_):
        return int(x)
    if op.name in BITWISE and not isinstance(x, int | np.integer):
        raise TypeError(f"op={op.name!r} needs integers, not {type(x).__name__}")
    return x


def combine_numbers(op: Operator, values: Sequence[Any]) -> Any:
    """Return the combination of numbers in this order; ints stay exact."""
    total = functools.reduce(op.pair, values)
    return total / len(values) if op.name == "avg" else total


def pack_number(x: Any) -> bytes:
    """Return a number as bytes: marshal for Python's own, pickle for numpy's."""
    return b"m" + marshal.dumps(x) if type(x) in (int, float, complex) else b"p" + pickle.dumps(x, 5)


def unpack_number(data: bytes) -> Any:
    """Undo `pack_number`."""
    return marshal.loads(data[1:]) if data[:1] == b"m" else pickle.loads(data[1:])
