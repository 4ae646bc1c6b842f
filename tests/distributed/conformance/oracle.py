"""What reductions should give: numpy's result on the gathered inputs, in rank order."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

OPERATORS = {
    "sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
"""What every operator should do with two arrays; apart from the library's table on purpose."""
DTYPES = ("b1", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4")


def example(dtype: str, size: int, rank: int, salt: int) -> np.ndarray[Any, Any]:
    """Return the input of one rank."""
    rng = np.random.default_rng([salt, rank, size])
    dt = np.dtype(dtype)
    if dt.kind == "b":
        return rng.integers(0, 2, size).astype(dt)
    if dt.kind in "iu":
        return rng.integers(0, 100, size).astype(dt)
    x = rng.standard_normal(size)
    if size:
        x[rng.integers(0, size, size // 50 + 1)] = np.nan
    return (x + 1j * rng.standard_normal(size)).astype(dt) if dt.kind == "c" else x.astype(dt)


def expected(op: str, inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the fold in rank order."""
    total = functools.reduce(OPERATORS[op], inputs)
    average = op == "avg" and len(inputs) > 1
    return np.true_divide(total, len(inputs)).astype(total.dtype) if average else total


def located(name: str, inputs: list[np.ndarray[Any, Any]], ranks: list[int]) -> tuple[Any, Any]:
    """Return the best values of all, and the lowest rank that has each; NaN is best."""
    best = functools.reduce(OPERATORS["max" if name == "maxloc" else "min"], inputs)
    where = np.full(best.shape, max(ranks), np.int64)
    for rank, x in sorted(zip(ranks, inputs, strict=True), key=lambda pair: -pair[0]):
        where[(x == best) | ((x != x) & (best != best))] = rank
    return best, where


KINDS = {"avg": "fc", "band": "biu", "bor": "biu", "bxor": "biu"}
"""Kinds of dtypes that an operator takes, of those that do not take all."""


def allowed(op: str, dtype: str) -> bool:
    """Whether numpy reduces this dtype so."""
    return np.dtype(dtype).kind in KINDS.get(op, np.dtype(dtype).kind)


def same(x: np.ndarray[Any, Any], want: np.ndarray[Any, Any], dtype: str, op: str) -> bool:
    """Whether the bits are equal; complex products may be fused elsewhere in an array, and are close."""
    want = want.astype(dtype)
    if op == "product" and np.dtype(dtype).kind == "c":
        return x.dtype == want.dtype and np.allclose(x, want, equal_nan=True)
    return x.dtype == want.dtype and x.tobytes() == want.tobytes()
