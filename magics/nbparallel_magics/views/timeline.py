"""``%parallel_timeline``: the last cell as a picture, or as a file of trace events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display

from nbparallel.wire.units import seconds_text
from nbparallel_magics import flags
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.session.monitoring.timeline import Timeline


def show(state: ExtensionState, save: str | None, begin: float | None, end: float | None) -> None:
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
