"""``%parallel_panel``: the live panel, where there are widgets; else a snapshot."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from IPython.display import display

from nbparallel_magics import flags
from nbparallel_magics.output.publisher import is_ipykernel
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import SessionActivity


def show(state: ExtensionState, *, close: bool) -> None:
    """Show the panel in this cell, or close it."""
    if close:
        if state.panel is None:
            flags.PANEL.error("no panel is open")
        state.close_panel()
        return
    if not is_ipykernel(state.shell) or importlib.util.find_spec("ipywidgets") is None:
        from nbparallel_widgets.panel_view import PanelView

        display(PanelView(now(state)))
        print("(as it is now: a panel that goes on needs a notebook and ipywidgets)")  # noqa: T201
        return
    if state.panel is None:
        from nbparallel_widgets.panel import Panel

        state.panel = Panel(lambda: now(state))
        state.panel.begin()  # this very cell
    state.panel.show()


def now(state: ExtensionState) -> SessionActivity | None:
    """Return what ranks do now; None if none are running, or they are just being stopped."""
    session = state.session
    if session is None or session.closed or not session.started:
        return None
    try:
        return session.activity()
    except RuntimeError:  # stopped between the two
        return None
