"""Loading and unloading the extension: what one puts in, the other takes out."""

from __future__ import annotations

import sys
from typing import Any

from nbparallel_magics.completion import RankCompleter
from nbparallel_magics.error_display import ErrorRendering
from nbparallel_magics.log_folder import remove_abandoned
from nbparallel_magics.magics import ParallelMagics
from nbparallel_magics.stale import sweep_at_load
from nbparallel_magics.state import Live

_ATTRIBUTE = "_nbparallel_magics"
"""The shell itself holds what is loaded into it: there may be several shells in one process."""


class _Loaded:
    """One loaded extension."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.live = Live(shell)
        self.magics = ParallelMagics(self.live)
        self.errors = ErrorRendering(shell)
        self.completer = RankCompleter(self.live)

    def install(self) -> None:
        self.shell.register_magics(self.magics)
        self.errors.install()
        self.completer.install()
        self.live.install()

    def remove(self) -> None:
        manager = self.shell.magics_manager
        for kind in ("line", "cell"):
            for name in self.magics.magics[kind]:
                if getattr(manager.magics[kind].get(name), "__self__", None) is self.magics:
                    del manager.magics[kind][name]
        self.shell.configurables.remove(self.magics)  # IPython's Magics puts itself there
        manager.registry.pop(type(self.magics).__name__, None)
        self.completer.remove()
        self.errors.remove()
        self.live.remove()


def load(shell: Any) -> None:
    """Put the magics into an IPython shell; a second time does nothing, and neither does it on a rank."""
    if _on_a_rank():
        print("nbparallel is loaded in the notebook; on a rank there is nothing to load")  # noqa: T201
    elif getattr(shell, _ATTRIBUTE, None) is None:
        loaded = _Loaded(shell)
        loaded.install()
        setattr(shell, _ATTRIBUTE, loaded)
        remove_abandoned()
        removed = sweep_at_load()
        if removed:
            print(removed)  # noqa: T201  (it belongs under the cell that loads us)
        loaded.live.warm.start()


def _on_a_rank() -> bool:
    sharing = sys.modules.get("nbparallel.sharing")  # a rank has it; here it would bring numpy
    return sharing is not None and sharing.current_store().client != 0


def unload(shell: Any) -> None:
    """End the ranks and take the magics out again; a second time does nothing."""
    loaded = getattr(shell, _ATTRIBUTE, None)
    if loaded is not None:
        setattr(shell, _ATTRIBUTE, None)
        loaded.remove()


def live_in(shell: Any) -> Live | None:
    """Return what is running in a shell, or None if the extension is not loaded there."""
    loaded = getattr(shell, _ATTRIBUTE, None)
    return None if loaded is None else loaded.live
