"""The context that is used where none is named."""

from __future__ import annotations

from multiprocessing.context import BaseContext
from typing import Any

_current: dict[str, Any] = {}


def default_context() -> Any:
    """Return the default context of this package."""
    return _current["context"]


def set_default_context(context: BaseContext) -> None:
    """Make `context` the default; `context.py` does so when it is imported."""
    _current["context"] = context


def concrete_context() -> Any:
    """Return the context of one start method that is used now."""
    return _current["context"].get_context()
