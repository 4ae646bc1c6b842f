"""Loading and unloading the extension in an IPython shell."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from nbparallel_magics.error_display import ErrorRendering
from nbparallel_magics.magics import ParallelMagics
from nbparallel_magics.run_cell import debug_rank
from nbparallel_magics.state import ExtensionState
from nbparallel_magics.views.introspection import RankCompleter, RankIntrospection

_ATTRIBUTE = "_nbparallel_magics"
"""Attribute of the shell with state, magics and all parts: a process may have several shells."""


def load(shell: Any) -> None:
    """Register the magics in an IPython shell (idempotent; does nothing on a rank)."""
    if _on_a_rank():
        print("nbparallel is loaded in the notebook; on a rank there is nothing to load")  # noqa: T201
    elif getattr(shell, _ATTRIBUTE, None) is None:
        state = ExtensionState(shell)
        magics = ParallelMagics(state)
        rendering = ErrorRendering(shell, partial(debug_rank, state))
        parts = RankCompleter(state), RankIntrospection(state), rendering, state
        shell.register_magics(magics)
        for part in parts:
            part.install()
        setattr(shell, _ATTRIBUTE, (state, magics, parts))
        if type(shell).__module__.startswith("xeus_python"):
            print(_IN_XEUS)  # noqa: T201
        state.prestarted.start()


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
    if loaded is None:
        return
    setattr(shell, _ATTRIBUTE, None)
    _, magics, parts = loaded
    manager = shell.magics_manager
    for kind in ("line", "cell"):
        for name in magics.magics[kind]:
            if getattr(manager.magics[kind].get(name), "__self__", None) is magics:
                del manager.magics[kind][name]
    manager.magics["line"].setdefault("debug", manager.registry["ExecutionMagics"].debug)
    shell.configurables.remove(magics)  # IPython's Magics puts itself there
    manager.registry.pop(type(magics).__name__, None)
    for part in parts:
        part.remove()
