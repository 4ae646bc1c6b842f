"""The live panel: an ipywidgets element that shows the activity of ranks.

::

    notebook's thread                     panel's thread                        front end
    -----------------                     --------------                        ---------
    begin, end (a cell of the notebook)   looks (0.2 s) while a cell runs  -->  the element's text
    close                                 sleeps without a time-out else

A cell keeps the notebook's thread busy, so another one has to look.  It reads memory only
(`Session.activity`), and sends nothing when nothing has changed; nothing comes back from the front end.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.display import display, update_display

from nbparallel.session.monitoring.activity import SessionActivity
from nbparallel_widgets.panel_view import PanelView

INTERVAL = 0.2
"""Seconds between two looks."""
JOIN_SECONDS = 2.0
"""How long `close` waits for a look that has begun."""

Look = Callable[[], SessionActivity | None]


class Panel:
    """The live panel of one notebook; owns its thread and its widget.

    Parameters
    ----------
    look : callable
        Returns what happens now, or None without a session; called in the panel's thread too.

    Notes
    -----
    `begin`, `end` and `close` may be called from any thread.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._shown: list[str] = []
        self._busy = False
        self._closed = False
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._html = ""
        self.widget = ipywidgets.HTML()
        self._refresh()
        self._thread = threading.Thread(target=self._run, name="nbparallel-panel", daemon=True)
        self._thread.start()

    def show(self) -> None:
        """Show the panel in the cell that runs; with what a page without widgets can show instead."""
        identity = uuid.uuid4().hex
        self._shown.append(identity)
        bundle = dict(self.widget._repr_mimebundle_() or {})
        display({**bundle, **self._frozen()}, raw=True, display_id=identity)

    def begin(self) -> None:
        """Refresh periodically from now on: the notebook runs a cell."""
        self._busy = True
        self._wake.set()

    def end(self) -> None:
        """Refresh once more, and then as long as ranks are busy."""
        self._busy = False
        self._wake.set()

    def close(self, *, leave: bool = True) -> None:
        """End the thread; with `leave`, what was shown last stays in its cells as text (idempotent)."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
        if leave:
            for identity in self._shown:
                update_display(self._frozen(), raw=True, display_id=identity)
            self.widget.close()

    def _frozen(self) -> dict[str, Any]:
        view = self._view
        return {"text/plain": repr(view), "text/html": view._repr_html_()}

    def _refresh(self) -> bool:
        """Refresh; return whether it may change soon."""
        activity = self._look()
        self._view = PanelView(activity)
        text = self._view._repr_html_()
        if text != self._html:
            self._html = text
            self.widget.value = text
        return activity is not None and activity.running

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            changing = True
            while changing and not self._closed:
                try:
                    changing = self._refresh() or self._busy
                except Exception as error:  # noqa: BLE001  the user sees it where the figures were
                    self.widget.value = f"the panel has ended: {type(error).__name__}: {error}"
                    return
                if changing:
                    self._ended.wait(INTERVAL)
