"""``%parallel_result``: the result of a cell that ran in the background, which shows what the cell showed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from nbparallel.errors import rank_list
from nbparallel.session import CellResult
from nbparallel_magics.output.cell_output import CellOutput
from nbparallel_magics.output.cell_views import CellView


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class DisplayedResult(CellResult):
    """The result of an ``--async`` cell: displayed, it shows once what the cell showed, and its values."""

    new_output: Callable[[], CellOutput]
    """Returns where that is shown."""
    views: Sequence[CellView]
    """What may stand below it."""
    cell: str
    """The cell's name, ``In[3]``."""
    ending: str
    """What is said if nothing was printed."""

    @classmethod
    def of(cls, result: CellResult, **more: Any) -> Self:
        """Return a result that can be displayed."""
        parts = {part.name: getattr(result, part.name) for part in fields(CellResult)}
        return cls(**parts, **more)

    def _ipython_display_(self) -> None:
        ran = f"{self.cell} is done on {rank_list(self.ranks)}, in {self.seconds:.3g} s"
        show(self.new_output(), self, self.views, f"{ran}; {self.ending}")


def show(sink: CellOutput, result: CellResult, views: Sequence[CellView], ending: str = "") -> None:
    """Show what a cell printed, `ending` if that is nothing, its values, and what its flags asked for."""
    for rank, part in result.ranks.items():
        sink.stream(rank, "stdout", part.stdout)
        sink.stream(rank, "stderr", part.stderr)
        for data in part.displays[: len(part.displays) - bool(part.text)]:
            sink.display(rank, dict(data), {}, {}, False)
        if part.text and part.displays:
            sink.result(rank, dict(part.displays[-1]), {})
    printed = any(part.stdout or part.stderr or part.displays for part in result.ranks.values())
    if not printed and ending:
        sink.note(ending)
    sink.finish()
    for view in views:
        view.show(result)
