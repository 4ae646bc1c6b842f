"""The strategy `file_region`: many arrays in one large region.

A region is anonymous memory (see `memfd`).  Every strategy packs small arrays (see `Region`); this one packs
all but the very large, so that tens of thousands of them cost no more descriptors, mappings and entries in
the supervisor's ledger than a few.  The price: the memory of arrays that other processes have seen is freed
with the last array of its region, not array by array.
"""

from __future__ import annotations

from nbparallel.sharing.memory.memory_limits import MemoryGuard
from nbparallel.sharing.strategies.memfd import MemfdStrategy
from nbparallel.sharing.strategies.strategy import REGION_NBYTES


class FileRegionStrategy(MemfdStrategy):
    """Large sealed memfds that hold arrays of up to half their size."""

    def __init__(self, region_nbytes: int = REGION_NBYTES, guard: MemoryGuard | None = None) -> None:
        super().__init__(guard)
        self._region_nbytes = region_nbytes

    # docstrings inherited

    @property
    def name(self) -> str:
        return "file_region"

    @property
    def packs_below(self) -> int:
        return self._region_nbytes // 2

    @property
    def region_nbytes(self) -> int:
        return self._region_nbytes
