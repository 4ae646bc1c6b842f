"""``--check-races``: what a cell's accesses to shared arrays say, below its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.display import display

from nbparallel_magics.output.publisher import Publisher

if TYPE_CHECKING:
    from nbparallel.distributed.races.comparison import RaceReport
    from nbparallel.session import PendingCell
    from nbparallel_magics.output.cell_output import CellOutput


class RaceDisplay:
    """Shows the report of each cell that is checked, and keeps it until the next cell begins."""

    def __init__(self) -> None:
        self.last: RaceReport | None = None
        """Of the last cell; None if that was not checked."""

    def show(self, report: RaceReport | None) -> None:
        """Show a report below the cell that runs; nothing if none was asked for."""
        self.last = report
        if report is not None:
            display(report)

    def show_of_error(self, error: BaseException, sink: CellOutput | None) -> None:
        """Show the report of a cell that failed: of what its ranks have done until then."""
        report = getattr(getattr(error, "result", None), "race_report", None)
        if report is not None and sink is not None:
            sink.finish()  # the report stands below it
        self.show(report)

    def when_ended(self, publisher: Publisher) -> Callable[[PendingCell], None]:
        """Return what shows the report of an ``--async`` cell below it, once that has ended."""

        def ended(pending: PendingCell) -> None:
            error = pending.exception()
            result: Any = pending.result() if error is None else getattr(error, "result", None)
            if (report := getattr(result, "race_report", None)) is not None:
                self.last = report
                publisher.display({"text/plain": str(report), "text/html": report._repr_html_()}, {}, {})

        return ended
