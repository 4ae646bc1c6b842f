"""What ``%parallel_timeline`` shows."""

from __future__ import annotations

import html
from dataclasses import dataclass, replace

from nbparallel.session.monitoring.timeline import Timeline
from nbparallel_widgets import timeline_svg, timeline_text


@dataclass(frozen=True, slots=True)
class TimelineView:
    """A timeline as a notebook shows it: a picture and a table, or all in letters."""

    timeline: Timeline
    """From `Session.timeline`."""

    def __repr__(self) -> str:
        return timeline_text.text(self.timeline)

    def _repr_html_(self) -> str:
        # The table says it once more where a page is cleaned of pictures (GitHub, an untrusted notebook).
        table = replace(timeline_text.table(self.timeline), foot="").html()
        lines = "<br>".join(html.escape(line) for line in timeline_text.foot(self.timeline))
        return f"<div>{timeline_svg.svg(self.timeline)}</div>{table}<div>{lines}</div>"
