"""The dtypes of the package ml_dtypes (bfloat16, float8, int4 …), which numpy itself cannot describe."""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any

import numpy as np

from nbparallel.sharing.tensors.bits import PREFIX, bits_name

MODULE = "ml_dtypes"
_FORM = re.compile(rf"{MODULE}\.[a-z][a-z0-9_]{{1,40}}")
_KINDS = (("uint", "u"), ("int", "i"), ("bfloat", "f"), ("float", "f"), ("bcomplex", "c"), ("complex", "c"))


def describe_extension(dtype: np.dtype[Any]) -> str:
    """Return how such a dtype is described to another process; empty: it is none of them."""
    kind = dtype.type
    return f"{MODULE}.{kind.__name__}" if kind.__module__ == MODULE else ""


@lru_cache(maxsize=64)
def rebuild_extension(form: str) -> np.dtype[Any] | None:
    """Return the dtype that `describe_extension` described, None if it described none.

    ml_dtypes is imported, which the sender has done already.
    """
    if not _FORM.fullmatch(form):
        return None
    try:
        kind = getattr(importlib.import_module(MODULE), form.removeprefix(f"{MODULE}."), None)
    except ImportError:
        return None
    return np.dtype(kind) if isinstance(kind, type) and issubclass(kind, np.generic) else None


def number_kind(dtype: np.dtype[Any]) -> str:
    """Return the kind of numbers that a dtype holds, as ``dtype.kind`` says it of those of numpy.

    >>> number_kind(np.dtype(float)), number_kind(np.dtype([("torch.bfloat16", "<u2")]))
    ('f', 'f')
    """
    if dtype.kind != "V":
        return dtype.kind
    name = dtype.type.__name__ if dtype.type.__module__ == MODULE else bits_name(dtype).removeprefix(PREFIX)
    return next((kind for start, kind in _KINDS if name.startswith(start)), "V")
