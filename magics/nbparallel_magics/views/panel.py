"""``%parallel_panel``: the live panel in a notebook, else a snapshot; ``%parallel_timeline``: the last cell.

The timeline is a picture, or a file of trace events.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display

from nbparallel.wire.units import seconds_text
from nbparallel_magics import flags
from nbparallel_magics.output.publisher import is_ipykernel, publisher_for
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import SessionActivity
    from nbparallel.session.monitoring.segments import SharedSegment
    from nbparallel.session.monitoring.timeline import Timeline


def show_panel(state: ExtensionState, *, close: bool) -> None:
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
    if state.pool is not None and (found is None or found.began_ns <= state.pool.began_ns):
        found = state.pool.activity(found)
    return found


def segments(state: ExtensionState) -> Sequence[SharedSegment] | None:
    """Return the session's segments, the largest first; None if no ranks are running."""
    session = state.session
    if session is None or session.closed or not session.started:
        return None
    try:
        return session.statistics(state.shell.user_ns).segments
    except RuntimeError:  # stopped between the two
        return None


def show_timeline(state: ExtensionState, save: str | None, begin: float | None, end: float | None) -> None:
    """Show the timeline of the last cell or of a part of it, or write it; UsageError if there is none."""
    if state.background is not None and not state.background.done():
        flags.TIMELINE.error(
            "the --async cell still runs: wait for it with %parallel_result, then its timeline is there"
        )
    session = state.running_session()
    timeline = None if session is None else session.timeline()
    if timeline is None:
        flags.TIMELINE.error("no cell has run on these ranks yet: run a %%parallel cell first")
    if begin is not None or end:
        if save:
            flags.TIMELINE.error("--save writes the whole cell, without --from and --to")
        first, last = begin or 0.0, min(end or timeline.seconds, timeline.seconds)
        if first >= last:
            whole = f"the cell took {seconds_text(timeline.seconds)}"
            flags.TIMELINE.error(f"there is nothing from {first:g} to {last:.3g} s: {whole}")
        timeline = timeline.part(first, last)
    if save is None:
        from nbparallel_widgets.timeline_view import TimelineView

        display(TimelineView(timeline))
    else:
        _save(timeline, Path(save).expanduser())


def _save(timeline: Timeline, path: Path) -> None:
    from nbparallel.session.monitoring.timeline import PRODUCER, chrome_trace

    try:
        if path.exists() and not _is_ours(path, PRODUCER):
            flags.TIMELINE.error(f"{path} exists and is no trace of nbparallel: choose another name")
        trace = chrome_trace(timeline)
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        flags.TIMELINE.error(f"{path} cannot be written: {error.strerror or error}")
    count = len(trace["traceEvents"])
    print(f"{path}: {count:,} trace events; open it at https://ui.perfetto.dev or chrome://tracing")  # noqa: T201


def _is_ours(path: Path, producer: str) -> bool:
    """Whether a file is one that this magic has written."""
    if not path.is_file():
        return False
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no text at all
        return False
    return isinstance(found, dict) and (found.get("otherData") or {}).get("producer") == producer
