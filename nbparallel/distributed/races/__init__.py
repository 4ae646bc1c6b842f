"""The detector of data races: an observer of cells (`nbparallel.distributed.runtime.observers`).

::

    observe, on each rank      checked_cell: names of shared arrays are bound to traced ones
      x[2:5] = y + 1           traced_array, numpy_functions; checked_cell: doors, seen code
      all_reduce(x)            operations: what they read and fill, and whose past they put in order
        the line, the bytes    access_recorder
    log                        access_log: crosses the border
    conclude, in the kernel    report: one race for each pair of lines
      Walk.run                 walk: each access beside the last ones of other ranks that nothing orders
        find_overlap           byte_sets: do both touch a byte?
      ArrayNames.place_of      array_names: bytes as `grid[0:8]`
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbparallel.distributed.races.access_log import AccessLog
    from nbparallel.distributed.races.report import RaceReport
    from nbparallel.distributed.runtime.observers import Observation, ObservedCell


def observe(cell: ObservedCell) -> AbstractContextManager[Observation]:
    """Record a cell's accesses to shared arrays while the block runs."""
    from nbparallel.distributed.races.checked_cell import checking  # few cells need it

    return checking(cell)


def conclude(logs: list[AccessLog], lost: Collection[int]) -> RaceReport:
    """Return the races of a cell, as far as its ranks have reported what they did."""
    from nbparallel.distributed.races.report import compare  # few cells need it

    return compare(logs, [name for log in logs for name in log.notebook_names], lost)
