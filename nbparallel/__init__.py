"""Run notebook cells on parallel ranks that share the notebook's numpy arrays without a copy.

In a notebook: ``%load_ext nbparallel``, then a cell that begins with ``%%parallel -n 4``; ``%%parallel?``
shows more.  In a script: ``with nbparallel.Session(4) as session: session.run("all_reduce(rank)")``.
"""

# ``import nbparallel`` is cheap: attributes load on first use (PEP 562), because the supervisor imports this
# package with nothing but the standard library on its path.
from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from nbparallel import (
        distributed as distributed,
        errors as errors,
        multiprocessing as multiprocessing,
        session as session,
        sharing as sharing,
        testing as testing,
    )
    from nbparallel.errors import *  # noqa: F403
    from nbparallel.session import CellResult, RankValues, Session, imap as imap, map as map, scaling, spawn
    from nbparallel.sharing import (
        empty,
        from_file,
        full,
        get_all_sharing_strategies,
        get_sharing_strategy,
        is_shared,
        ones,
        register_sharing_strategy,
        segments,
        set_sharing_strategy,
        share,
        zeros,
    )

_HOMES = {
    "CellResult": "nbparallel.session",
    "RankValues": "nbparallel.session",
    "Session": "nbparallel.session",
    "empty": "nbparallel.sharing",
    "from_file": "nbparallel.sharing",
    "full": "nbparallel.sharing",
    "imap": "nbparallel.session",
    "get_all_sharing_strategies": "nbparallel.sharing",
    "get_sharing_strategy": "nbparallel.sharing",
    "is_shared": "nbparallel.sharing",
    "map": "nbparallel.session",
    "ones": "nbparallel.sharing",
    "register_sharing_strategy": "nbparallel.sharing",
    "scaling": "nbparallel.session",
    "segments": "nbparallel.sharing",
    "set_sharing_strategy": "nbparallel.sharing",
    "share": "nbparallel.sharing",
    "spawn": "nbparallel.session",
    "zeros": "nbparallel.sharing",
}
_MODULES = ("distributed", "errors", "multiprocessing", "session", "sharing", "testing")

__version__ = "0.1.0.dev0"
__all__ = [  # not `map`: after ``from nbparallel import *`` Python's own would be hidden
    "CellResult",
    "RankValues",
    "Session",
    "empty",
    "from_file",
    "full",
    "get_all_sharing_strategies",
    "get_sharing_strategy",
    "imap",
    "is_shared",
    "ones",
    "register_sharing_strategy",
    "scaling",
    "segments",
    "set_sharing_strategy",
    "share",
    "spawn",
    "zeros",
]


def _need_of_linux() -> str:
    system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    return (
        f"nbparallel runs on Linux, not on {system}: run it in Docker (Dockerfile of the repository), in "
        "VS Code or Codespaces (.devcontainer), on mybinder.org (.binder), in Colab, or on Windows "
        "in WSL 2 (docs/get-started/install.md has a line for each)"
    )


class _NoPath(list[str]):
    """Where no module is found: whichever is asked for, the answer is the same sentence."""

    def __iter__(self) -> NoReturn:
        raise ImportError(_need_of_linux(), name=__name__)


if sys.platform != "linux":
    __path__ = _NoPath(__path__)  # noqa: F405


def _find(name: str) -> Any:
    if name.startswith("__"):  # Python itself asks for many of these
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    home = _HOMES.get(name)
    if home is not None:
        value = globals()[name] = getattr(importlib.import_module(home), name)
        return value
    if name in _MODULES:
        return importlib.import_module(f"nbparallel.{name}")
    if name.endswith("Error"):  # `except nbp.ParallelError`, as a notebook would write it
        error = getattr(importlib.import_module("nbparallel.errors"), name, None)
        if error is not None:
            return error
    raise importlib.import_module("nbparallel.errors").misspelt(name, "nbparallel", [*__all__, *_MODULES])


if not TYPE_CHECKING:  # a checker would take every name for one of this module
    __getattr__ = _find


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *_HOMES, *_MODULES})


def load_ipython_extension(shell: Any) -> None:
    """Add the magics to an IPython shell: what ``%load_ext nbparallel`` calls."""
    if sys.platform != "linux":
        from IPython.core.error import UsageError  # shown as a line, without a traceback

        raise UsageError(_need_of_linux())
    from nbparallel_magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stop the ranks and take the magics away: what ``%unload_ext nbparallel`` calls."""
    from nbparallel_magics import unload

    unload(shell)
