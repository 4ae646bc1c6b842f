"""Modules of the notebook: which import brings them, and their submodules, to a rank."""

from __future__ import annotations

import sys
import types


def is_importable(module: types.ModuleType) -> bool:
    """Whether importing its name would bring this module (one made by hand travels by value)."""
    return sys.modules.get(module.__name__) is module and (
        getattr(module, "__spec__", None) is not None or module.__name__ == "__main__"
    )


def find_modules(module: types.ModuleType, mentioned: frozenset[str]) -> tuple[str, ...]:
    """Return the module's name and those of its loaded submodules that a cell may use.

    ``import scipy`` on a rank does not bring ``scipy.sparse``, which the notebook has imported: a submodule
    counts if every part of its name occurs in the cell or in a function that it uses.
    """
    found = [module.__name__]
    for parent in found:  # grows while it is walked
        prefix = parent + "."
        found += [prefix + name for name in mentioned if prefix + name in sys.modules]
    return (found[0], *sorted(found[1:]))
