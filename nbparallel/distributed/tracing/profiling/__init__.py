"""The line profiler: an observer of cells (`nbparallel.distributed.runtime.observers`).

::

    observe, on each rank      line_clock: CPython 3.12 on; line_sampler: older
    log                        line_log: nanoseconds of each line; crosses the border
    conclude, in the kernel    profile: the lines of all ranks side by side
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbparallel.distributed.runtime.observers import ObservedCell
    from nbparallel.distributed.tracing.profiling.line_log import LineLog
    from nbparallel.distributed.tracing.profiling.profile import Profile


class LineProfiler:
    """Profiles the lines of one cell on a rank."""

    def __init__(self, cell: ObservedCell) -> None:
        from nbparallel.distributed.runtime.call_site import label_function

        self._rank, self._label_of = cell.communicator.rank, label_function(cell.filename)
        self.remark = ""
        self.clock: Any
        if sys.version_info >= (3, 12):
            from nbparallel.distributed.tracing.profiling.line_clock import LineClock

            self.clock = LineClock(self._label_of, cell.communicator.spent)
        else:
            from nbparallel.distributed.tracing.profiling.line_sampler import LineSampler

            self.clock = LineSampler(self._label_of, cell)

    def value(self, value: Any) -> Any:
        """Return the value of the cell's last expression: it is left alone."""
        return value

    def log(self) -> LineLog:
        """Return the time of each line, with its text."""
        from nbparallel.distributed.tracing.profiling.line_log import LineLog

        lines = tuple((filename, line, *times) for filename, line, times in self.clock.lines())
        files = {filename: self._label_of(filename) or "" for filename, *_ in lines if filename}
        texts = {filename: (label, tuple(linecache.getlines(filename))) for filename, label in files.items()}
        return LineLog(self._rank, lines, texts, self.remark or self.clock.remark)


@contextmanager
def observe(cell: ObservedCell) -> Iterator[LineProfiler]:
    """Measure the lines of a cell on this rank while the block runs."""
    profiler = LineProfiler(cell)
    try:
        profiler.clock.start()
    except RuntimeError as error:
        profiler.remark = str(error)
        yield profiler
        return
    try:
        yield profiler
    finally:
        profiler.clock.stop()


def conclude(logs: list[LineLog], lost: Collection[int]) -> Profile:
    """Return the lines of all ranks side by side."""
    from nbparallel.distributed.tracing.profiling.profile import Profile  # few cells need it

    return Profile.of(logs, lost)
