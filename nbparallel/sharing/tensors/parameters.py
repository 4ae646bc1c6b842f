"""Gradients of torch's parameters and modules, where a user passes those and means the gradients."""

from __future__ import annotations

import sys
from typing import Any

from nbparallel.errors import with_article


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


def fill_module(module: Any, value: object) -> Any:
    """Give a module the parameters and buffers of another one, as ``load_state_dict`` does; return it.

    Raises
    ------
    TypeError
        `value` is no module.
    RuntimeError
        They differ in names or shapes; torch's message says which.
    """
    if not is_module(value):
        raise TypeError(
            f"{with_article(type(module).__name__)} that is passed takes a module's parameters, and what "
            f"came is of type {type(value).__name__}: pass None to get it as a new value"
        )
    module.load_state_dict(value.state_dict())  # type: ignore[attr-defined]
    return module
