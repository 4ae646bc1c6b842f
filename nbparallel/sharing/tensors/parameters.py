"""Gradients of torch's parameters and modules, where a user passes those and means the gradients."""

from __future__ import annotations

import sys
from typing import Any


def _is_of(x: object, name: str) -> bool:
    kind = getattr(sys.modules.get("torch.nn"), name, None)
    return kind is not None and isinstance(x, kind)


def is_module(x: object) -> bool:
    """Return whether `x` is a ``torch.nn.Module``."""
    return _is_of(x, "Module")


def gradient_of(x: Any) -> Any:
    """Return the gradient of a parameter, None if it has none; anything else as it is."""
    return x.grad if _is_of(x, "Parameter") else x


def named_gradients(module: Any) -> dict[str, Any]:
    """Return the gradients of a module's parameters by their names, of those that have one."""
    return {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
