"""Reduction operators.

To add an operator, add a row to `OPERATORS` (and its name to `ReduceOp`); all reductions read the
table.  What torch calls likewise is a line of `_NAMES` in `torch_backend/operands.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.sharing import tensors
from nbparallel.sharing.tensors import bits_name, bits_operator, number_kind

_NUMERIC = "biufcmM"
"""Kinds of dtypes that can be reduced at all."""
_ORDERED = "biufmM"


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
    PREMUL_SUM = enum.nonmember("premul_sum")
    """torch's name; `find_operator` says what to do instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One way to combine values; equal to itself alone, which makes it a quick key."""

    name: str
    ufunc: Callable[..., Any]
    """Combines two arrays; a ufunc, or called as one."""
    pair: Callable[[Any, Any], Any]
    """Combines two numbers of Python or numpy, of which bools came as ints; ints stay exact."""
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
    if type(total) is np.ndarray and total.dtype.kind == "V":  # ml_dtypes divides by its own numbers alone
        np.divide(total, total.dtype.type(count), out=total)
    else:
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


def _choose(better: np.ufunc) -> Callable[..., Any]:
    """Return what combines arrays of pairs of a value and a location, and is called as a ufunc."""

    def choose(a: Any, b: Any, out: Any) -> Any:
        mine, other = a["value"], b["value"]
        nan, other_nan = mine != mine, other != other
        same = (mine == other) | (nan & other_nan)
        take = better(other, mine) | (other_nan & ~nan) | (same & (b["location"] < a["location"]))
        out[...] = np.where(take, b, a)  # of both before: it may be either
        return out

    return choose


def _choose_pair(better: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return what combines two pairs of a number and a location."""

    def choose(a: Any, b: Any) -> Any:
        value = better(a[0], b[0])
        same = a[0] == b[0] or (a[0] != a[0] and b[0] != b[0])
        return min(a, b, key=lambda pair: pair[1]) if same else a if value is a[0] else b

    return choose


LOCATING = {
    "maxloc": Operator("max", _choose(np.greater), _choose_pair(_greater), kinds=_ORDERED),
    "minloc": Operator("min", _choose(np.less), _choose_pair(_lesser), kinds=_ORDERED),
}
"""Operators on pairs of a value and a location, by operation: the best value, or a NaN, and where it is; the
lowest location of several."""


def shown_dtype(dtype: Any) -> str:
    """Return a dtype, or the word that stands for one, as messages name it; of pairs that of the values."""
    if isinstance(dtype, str):
        return dtype
    names = dtype.names or ()
    return tensors.shown_dtype(dtype["value"] if "value" in names else dtype)


def find_operator(op: object) -> Operator:
    """Return the operator called `op`.

    Raises
    ------
    TypeError
        `op` is not a string.
    ValueError
        There is no such operator; the message lists them.
    """
    if type(op).__name__ == "RedOpType":  # torch's own ReduceOp.SUM
        op = getattr(op, "name", op)
    if not isinstance(op, str):
        raise TypeError(
            f"op must be a string or a ReduceOp, not {type(op).__name__}: {', '.join(map(repr, OPERATORS))}"
        )
    found = OPERATORS.get(op.lower())
    if found is None and op.lower() == ReduceOp.PREMUL_SUM:
        raise ValueError("the operator 'premul_sum' needs a factor: multiply before, all_reduce(factor * x)")
    if found is None:
        meant = "; did you mean 'avg'?" if op.lower() in ("mean", "average") else ""
        names = ", ".join(map(repr, OPERATORS))
        raise ValueError(f"there is no operator {str(op)!r}; choose one of {names}{meant}")
    return found


@functools.lru_cache(maxsize=1024)
def operator_for(op: Operator, dtype: np.dtype[Any]) -> Operator:
    """Return the operator as it works on arrays of a dtype; cached, since asking numpy takes microseconds.

    That is itself, but for bits of elements that only torch computes with.

    Raises
    ------
    TypeError
        Arrays of this dtype cannot be reduced in place.
    """
    if bits_name(dtype):
        return _operator_for_bits(op, bits_name(dtype))
    kind = number_kind(dtype)
    if kind not in op.kinds:
        numeric = "does not work for arrays of dtype {dtype}"
        hint = op.hint or (numeric if kind in _NUMERIC else "needs numbers, and this array has dtype {dtype}")
        raise TypeError(f"op={op.name!r} {hint.format(dtype=dtype)}")
    probe = np.ones(1 if kind != dtype.kind else 0, dtype)  # what stands for extensions may fail with a value
    try:
        op.ufunc(probe, probe, out=probe)
        if op.finish is not None and probe.size:
            op.finish(probe, 2)
    except TypeError as error:
        raise TypeError(f"op={op.name!r} does not work for arrays of dtype {dtype}") from error
    return op


def _operator_for_bits(op: Operator, name: str) -> Operator:
    try:
        compute = bits_operator(op.ufunc.__name__, name)
    except TypeError as error:
        shown = name.removeprefix("torch.")
        raise TypeError(f"op={op.name!r} does not work for tensors of dtype {shown}: {error}") from error
    finish = None if op.finish is None else compute.divide
    # A NaN may come out with other bits where torch works at many elements at a time.
    return dataclasses.replace(op, ufunc=compute, finish=finish, inexact_kinds="V")


def combine(op: Operator, inputs: Sequence[Any], out: Any) -> None:
    """Combine arrays in rank order into `out`, which is the first of them or none."""
    ufunc, total = op.ufunc, inputs[0]
    for other in inputs[1:]:
        total = ufunc(total, other, out=out)
    finish_array(op, out, len(inputs))


def finish_array(op: Operator, total: Any, count: int) -> None:
    """Take an operator's last step, for an array into which `count` arrays were combined."""
    if op.finish is not None and count > 1:  # dividing by 1 changes complex NaNs
        op.finish(total, count)
