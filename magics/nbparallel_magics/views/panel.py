"""``%parallel_panel``: the live panel, where there are widgets; else a look at this moment."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from IPython.display import display

from nbparallel_magics import flags
from nbparallel_magics.output.publisher import is_ipykernel
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import SessionActivity


def show(live: ExtensionState, *, close: bool) -> None:
    """Show the panel in this cell, or close it."""
    if close:
        if live.panel is None:
            flags.PANEL.error("no panel is open")
        live.close_panel()
        return
    if not is_ipykernel(live.shell) or importlib.util.find_spec("ipywidgets") is None:
        from nbparallel_widgets.panel_view import PanelView

        display(PanelView(now(live)))
        print("(as it is now: a panel that goes on needs a notebook and ipywidgets)")  # noqa: T201
        return
    if live.panel is None:
        from nbparallel_widgets.panel import Panel

        live.panel = Panel(lambda: now(live))
        live.panel.begin()  # this very cell
    live.panel.show()


def now(live: ExtensionState) -> SessionActivity | None:
    """Return what ranks do now; None if none are running, or they are just being stopped."""
    session = live.session
    if session is None or session.closed or not session.started:
        return None
    try:
        return session.activity()
    except RuntimeError:  # stopped between the two
        return None
