"""A session's activity as it is shown: as text, and as HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbparallel.errors import NO_RANKS
from nbparallel.errors.text.escaping import escape_html
from nbparallel.session.monitoring.activity import SessionActivity
from nbparallel.session.monitoring.segments import SharedSegment
from nbparallel_widgets.panel_matrices import matrix_grids
from nbparallel_widgets.panel_memory import memory_html, memory_text, segment_grids
from nbparallel_widgets.panel_rows import ranks_html, ranks_text
from nbparallel_widgets.panel_sheet import STALE, STYLE, details_html, folded_html

NOTHING_YET = "known when a cell has ended"
"""What a fold opens before there is anything."""
NOT_ON_HOSTS = "not known of ranks on several hosts"


@dataclass(frozen=True, slots=True)
class PanelView:
    """The activity of a session at one moment; None: no ranks are running."""

    activity: SessionActivity | None
    """From `Session.activity`."""
    segments: Sequence[SharedSegment] | None = None
    """From `Session.statistics`, the largest first; None: not looked at."""
    note: str = ""
    """A line above."""

    def __repr__(self) -> str:
        return "\n".join(part for part in (self._figures_text(), self._folded_text()) if part)

    def _repr_html_(self) -> str:
        if self.activity is None:
            return self._figures_html()
        return f'{STYLE}{self._figures_html()}<div class="nbp">{details_html(self._folded())}</div>'

    @property
    def changing(self) -> bool:
        """Whether a cell runs, or is about to."""
        return self.activity is not None and self.activity.phase in ("starting", "moving", "running")

    def figures_bundle(self, *, live: bool = True) -> dict[str, str]:
        """Return the output that changes while a cell runs; not `live`: it is the last one."""
        stale = STALE if live and self.changing else ""
        return {"text/plain": self._figures_text(), "text/html": self._figures_html() + stale}

    def folded_bundle(self, identity: str) -> dict[str, str]:
        """Return the output that the folds of `identity` open."""
        return {"text/plain": self._folded_text(), "text/html": folded_html(identity, self._folded())}

    def note_bundle(self) -> dict[str, str]:
        """Return the note alone."""
        return {"text/plain": self.note, "text/html": f'<div class="nbp">{_paragraph(self.note)}</div>'}

    def _figures_text(self) -> str:
        if self.activity is None:
            return NO_RANKS
        parts = (self.note, ranks_text(self.activity), memory_text(self.activity))
        return "\n".join(part for part in parts if part)

    def _figures_html(self) -> str:
        if self.activity is None:
            return f'<div class="nbp">{_paragraph(NO_RANKS)}</div>'
        note = _paragraph(self.note) if self.note else ""
        return f'<div class="nbp">{note}{ranks_html(self.activity)}{memory_html(self.activity)}</div>'

    def _folded(self) -> dict[str, str]:
        if self.activity is None:
            return {}
        empty = NOT_ON_HOSTS if any(rank.host for rank in self.activity.ranks) else NOTHING_YET
        grids = {
            "segments": segment_grids(self.activity, self.segments),
            "matrices": matrix_grids(self.activity),
        }
        return {
            name: "".join(grid.html() for grid in found) or _paragraph(empty) for name, found in grids.items()
        }

    def _folded_text(self) -> str:
        if self.activity is None:
            return ""
        grids = [*segment_grids(self.activity, self.segments), *matrix_grids(self.activity)]
        return "\n\n".join(grid.text() for grid in grids)


def _paragraph(text: str) -> str:
    return f"<p>{escape_html(text)}</p>"
