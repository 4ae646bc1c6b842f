"""The live panel: outputs of a notebook that show the activity of ranks while a cell runs.

::

    notebook's thread                     panel's thread                        front end
    -----------------                     --------------                        ---------
    begin (a cell of the notebook)        looks while a cell runs          -->  the figures' output
    end: looks once more, before the cell's end is reported                -->  figures, folded tables
    close                                 sleeps without a time-out else

A cell keeps the notebook's thread busy, so another one has to look.  It reads memory only
(`Session.activity`), and sends nothing when nothing has changed; nothing comes back from the front end.

These are ordinary outputs, replaced by their ``display_id``, and no widget: what was shown last is in the
saved notebook as text and HTML, whatever became of the kernel (as text, of a cell that runs, its sentence).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nbparallel.session.monitoring.activity import SessionActivity
from nbparallel.session.monitoring.segments import SharedSegment
from nbparallel_widgets.panel_course import Course
from nbparallel_widgets.panel_view import PanelView
from nbparallel_widgets.sheet import folds_bundle

INTERVAL = 0.2
"""Seconds between two looks at least."""
SHARE = 0.003
"""Of a cell's time, which looks may take: on a slow machine they are fewer.  The cell's end takes as much."""
SELDOM = 1.0
"""Seconds between two looks at most, if only their cost counts."""
BYTES_PER_SECOND = 150_000
"""What the panel of many ranks sends at most: a Jupyter server drops all output beyond 1 MB/s."""
OUTPUTS = ("figures", "folds", "folded")
"""What a panel consists of, in order."""
JOIN_SECONDS = 2.0
"""How long `close` waits for a look that has begun."""
ENDED = "(the ranks were stopped; this is what they did last; %parallel_panel shows the next ones)"


class PanelPublisher(Protocol):
    """Destination of a panel's outputs; may be called from any thread."""

    def display(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        """Show an output."""

    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        """Replace an output by its ``display_id``."""


class Panel:
    """The live panel of one notebook; owns its thread.

    Parameters
    ----------
    look : callable
        Returns what happens now, or None without a session; called in the panel's thread too.
    survey : callable
        Returns the segments, or None without a session; called when a cell has ended.
    publisher : PanelPublisher
        Sends for the cell that runs.

    Notes
    -----
    `begin`, `end` and `close` may be called from any thread.
    """

    def __init__(
        self,
        look: Callable[[], SessionActivity | None],
        survey: Callable[[], Sequence[SharedSegment] | None],
        publisher: PanelPublisher,
    ) -> None:
        self._look, self._survey, self._publisher = look, survey, publisher
        self._identity = uuid.uuid4().hex
        self._sent: dict[str, dict[str, str]] = {}
        self._busy = self._changing = False
        self._failed = False
        self._refreshing = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._course = Course()
        self._view = PanelView(look(), survey())
        self._thread = threading.Thread(target=self._run, name="nbparallel-panel", daemon=True)
        self._thread.start()

    def show(self, publisher: PanelPublisher) -> None:
        """Show the panel, as it is now, where `publisher` shows it."""
        with self._refreshing:
            self._renew(at_end=True)
            self._sent = self._outputs(OUTPUTS)
            for name, data in self._sent.items():
                publisher.display(data, {}, {"display_id": self._display_id(name)})

    def begin(self, publisher: PanelPublisher) -> None:
        """Refresh periodically from now on: the notebook runs a cell, for which `publisher` sends."""
        self._publisher = publisher
        self._busy, self._failed = True, False
        self._wake.set()

    def end(self) -> None:
        """Refresh now, so that it is shown before the cell's end; then as long as ranks are busy."""
        self._busy = False
        if not self._closed.is_set():
            self._refresh(at_end=True)
        self._wake.set()

    def close(self, *, leave: bool = True) -> None:
        """End the thread; with `leave`, the panel's last state is sent once more (idempotent)."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
        if leave:
            self._refresh(at_end=True)

    def _refresh(self, *, at_end: bool) -> None:
        """Look, and send what has changed; note whether it may change soon."""
        with self._refreshing:
            try:
                before = self._view
                self._changing = self._renew(at_end=at_end)
                if self._view is before and not self._closed.is_set():
                    return
                # what a user reads stands still while a cell runs
                outputs = self._outputs(("figures",) if self._changing and not at_end else OUTPUTS)
            except Exception as error:  # noqa: BLE001  the user sees it where the figures were
                self._failed = True
                text = f"the panel could not be renewed: {type(error).__name__}: {error}"
                self._changing, outputs = False, {"figures": PanelView(None, note=text).figures_bundle()}
            for name, data in outputs.items():
                if self._sent.get(name) not in (None, data):  # None: not shown yet
                    self._sent[name] = data
                    self._publisher.update(data, {}, {"display_id": self._display_id(name)})

    def _renew(self, *, at_end: bool) -> bool:
        """Look at what happens now; what ranks did last remains when they have been stopped."""
        activity, old = self._look(), self._view
        if activity is None:
            self._view = replace(old, note=ENDED if old.activity is not None else "")
            return False
        self._course.add(activity)
        changing = PanelView(activity).changing
        # A survey waits for an array that is on its way into shared memory: never while the notebook is busy.
        segments = self._survey() if at_end or not (changing or self._busy) else old.segments
        if (activity, segments) == (old.activity, old.segments) and not old.note:
            return changing  # nothing is new
        as_of = time.strftime("%H:%M:%S")
        self._view = PanelView(activity, segments, course=self._course, as_of=as_of)
        return changing

    def _outputs(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        view = self._view
        made: dict[str, Callable[[], dict[str, str]]] = {
            "figures": lambda: view.figures_bundle(live=not self._closed.is_set()),
            "folds": lambda: folds_bundle(self._identity, live=not self._closed.is_set()),
            "folded": lambda: view.folded_bundle(self._identity),
        }
        return {name: made[name]() for name in names}

    def _display_id(self, name: str) -> str:
        return f"nbparallel-panel-{self._identity}-{name}"

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            self._follow()

    def _follow(self) -> None:
        """Refresh as long as something may change."""
        pause = INTERVAL
        while not self._closed.wait(pause) and (self._busy or self._changing) and not self._failed:
            began = time.thread_time()
            self._refresh(at_end=False)
            size = len(self._sent.get("figures", {}).get("text/html", ""))
            spent = time.thread_time() - began
            pause = max(INTERVAL, min(spent / SHARE, SELDOM), size / BYTES_PER_SECOND)
