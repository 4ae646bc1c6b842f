"""Loading and unloading the extension in an IPython shell."""

from __future__ import annotations

import sys
from typing import Any

from nbparallel_magics.completion import RankCompleter
from nbparallel_magics.error_display import ErrorRendering
from nbparallel_magics.magics import ParallelMagics
from nbparallel_magics.state import ExtensionState
from nbparallel_magics.views.introspection import RankIntrospection

_ATTRIBUTE = "_nbparallel_magics"
"""Attribute of the shell with its `_LoadedExtension`: a process may have several shells."""


class _LoadedExtension:
    """The extension in one shell: state, magics, error display, completer."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.state = ExtensionState(shell)
        self.magics = ParallelMagics(self.state)
        self.errors = ErrorRendering(shell)
        self.completer = RankCompleter(self.state)
        self.introspection = RankIntrospection(shell, self.state.running_session)

    def install(self) -> None:
        self.shell.register_magics(self.magics)
        self.errors.install()
        self.completer.install()
        self.introspection.install()
        self.state.install()

    def remove(self) -> None:
        manager = self.shell.magics_manager
        for kind in ("line", "cell"):
            for name in self.magics.magics[kind]:
                if getattr(manager.magics[kind].get(name), "__self__", None) is self.magics:
                    del manager.magics[kind][name]
        self.shell.configurables.remove(self.magics)  # IPython's Magics puts itself there
        manager.registry.pop(type(self.magics).__name__, None)
        self.completer.remove()
        self.introspection.remove()
        self.errors.remove()
        self.state.remove()


def load(shell: Any) -> None:
    """Register the magics in an IPython shell (idempotent; does nothing on a rank)."""
    if _on_a_rank():
        print("nbparallel is loaded in the notebook; on a rank there is nothing to load")  # noqa: T201
    elif getattr(shell, _ATTRIBUTE, None) is None:
        loaded = _LoadedExtension(shell)
        loaded.install()
        setattr(shell, _ATTRIBUTE, loaded)
        if type(shell).__module__.startswith("xeus_python"):
            print(_IN_XEUS)  # noqa: T201
        loaded.state.prestarted.start()


_IN_XEUS = (
    "nbparallel: in the xeus-python kernel the output of ranks is incomplete: it shows none that comes from "
    "other threads; use the kernel of ipykernel"
)
"""xeus-python sends what the cell's own thread prints, and ours are others."""


def _on_a_rank() -> bool:
    sharing = sys.modules.get("nbparallel.sharing")  # a rank has it; here it would bring numpy
    return sharing is not None and sharing.current_store().client != 0


def unload(shell: Any) -> None:
    """End the ranks and remove the magics (idempotent)."""
    loaded = getattr(shell, _ATTRIBUTE, None)
    if loaded is not None:
        setattr(shell, _ATTRIBUTE, None)
        loaded.remove()


def state_of(shell: Any) -> ExtensionState | None:
    """Return the state of the extension in a shell, or None if it is not loaded there."""
    loaded = getattr(shell, _ATTRIBUTE, None)
    return None if loaded is None else loaded.state
