"""``%parallel_panel``: the live panel in a notebook; else a snapshot."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from IPython.display import display

from nbparallel_magics import flags
from nbparallel_magics.output.publisher import is_ipykernel, publisher_for
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import SessionActivity
    from nbparallel.session.monitoring.segments import SharedSegment


def show(state: ExtensionState, *, close: bool) -> None:
    """Show the panel in this cell, or close it."""
    if close:
        if state.panel is None:
            flags.PANEL.error("no panel is open")
        state.close_panel()
        return
    if not is_ipykernel(state.shell):
        from nbparallel_widgets.panel_view import PanelView

        display(PanelView(now(state), segments(state)))
        print("(as it is now: a panel that goes on needs a notebook)")  # noqa: T201
        return
    publisher = publisher_for(state.shell, state.notebook)
    if state.panel is None:
        from nbparallel_widgets.panel import Panel

        state.panel = Panel(lambda: now(state), lambda: segments(state), publisher)
        state.panel.begin(publisher)  # this very cell
    state.panel.show(publisher)


def now(state: ExtensionState) -> SessionActivity | None:
    """Return what ranks do now, or workers of a pool if that began later; None if none are running."""
    session, found = state.session, None
    if session is not None and not session.closed:
        with contextlib.suppress(RuntimeError):  # not started yet, or stopped between the two
            found = session.activity()
    module = sys.modules.get("nbparallel.multiprocessing.workers.worker_pipes")
    if module is not None:
        state.pool = module.newest() or state.pool  # it is shown also when the pool is gone
    if state.pool is None or (found is not None and found.began_ns > state.pool.began_ns):
        return found
    activity: SessionActivity = state.pool.activity(found)
    return activity


def segments(state: ExtensionState) -> Sequence[SharedSegment] | None:
    """Return the session's segments, the largest first; None if no ranks are running."""
    session = state.session
    if session is None or session.closed or not session.started:
        return None
    try:
        return session.statistics(state.shell.user_ns).segments
    except RuntimeError:  # stopped between the two
        return None
