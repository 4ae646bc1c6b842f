"""The line profiler: an observer of cells (`nbparallel.distributed.runtime.observers`).

::

    observe, on each rank      line_clock: CPython 3.12 on; line_log: older
    log                        line_log: nanoseconds of each line; crosses the border
    conclude, in the kernel    profile: the lines of all ranks side by side
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbparallel.distributed.runtime.observers import Observation, ObservedCell
    from nbparallel.distributed.tracing.profiling.line_log import LineLog
    from nbparallel.distributed.tracing.profiling.profile import Profile


last: Profile | None = None
"""Of the last cell or map of this process that was profiled."""


def observe(cell: ObservedCell) -> AbstractContextManager[Observation]:
    """Measure the lines of a cell on this rank while the block runs."""
    if sys.version_info >= (3, 12):
        from nbparallel.distributed.tracing.profiling.line_clock import LineClock

        return LineClock(cell)
    from nbparallel.distributed.tracing.profiling.line_log import LineSampler

    return LineSampler(cell)


def conclude(logs: list[LineLog], lost: Collection[int]) -> Profile:
    """Return the lines of all ranks side by side."""
    from nbparallel.distributed.tracing.profiling.profile import Profile  # few cells need it

    global last
    last = Profile.of(logs, lost)
    return last
