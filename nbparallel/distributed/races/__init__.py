"""The detector of data races: an observer of cells (`nbparallel.distributed.runtime.observers`).

::

    observe    on each rank    recording     what its code did with shared arrays, and what operations order
    conclude   in the kernel   comparison    what two ranks did to the same bytes with nothing to order them
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbparallel.distributed.races.access_log import AccessLog
    from nbparallel.distributed.races.comparison import RaceReport
    from nbparallel.distributed.runtime.observers import Observation, ObservedCell


def observe(cell: ObservedCell) -> AbstractContextManager[Observation]:
    """Record a cell's accesses to shared arrays while the block runs."""
    from nbparallel.distributed.races.recording.checked_cell import checking  # few cells need it

    return checking(cell)


def conclude(logs: list[AccessLog], lost: Collection[int]) -> RaceReport:
    """Return the races of a cell, as far as its ranks have reported what they did."""
    from nbparallel.distributed.races.comparison import compare  # few cells need it

    return compare(logs, [name for log in logs for name in log.notebook_names], lost)
