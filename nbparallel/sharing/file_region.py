"""The strategy `file_region`: many arrays in one large region.

A region is anonymous memory (see `anonymous`).  Every strategy packs small arrays (see `packing`); this one
packs all but the very large, so that tens of thousands of them cost no more descriptors, mappings and entries
in the supervisor's ledger than a few.  The price: what other processes have seen goes when the last array of
its region has gone, not array by array.
"""

from __future__ import annotations

from nbparallel.sharing import anonymous
from nbparallel.sharing.headroom import Headroom
from nbparallel.sharing.mapping import Access, Mapping
from nbparallel.sharing.reserving import map_whole
from nbparallel.sharing.strategy import REGION_NBYTES, Intend, SegmentSource, Strategy, nobody


class FileRegionStrategy(Strategy):
    """Large sealed memfds that hold arrays of up to half their size."""

    def __init__(self, region_nbytes: int = REGION_NBYTES, headroom: Headroom | None = None) -> None:
        self._region_nbytes = region_nbytes
        self._headroom = headroom or Headroom()

    # docstrings inherited

    @property
    def name(self) -> str:  # noqa: D102
        return "file_region"

    @property
    def unavailable_reason(self) -> str | None:  # noqa: D102
        return anonymous.missing_reason()

    @property
    def supports_read_only(self) -> bool:  # noqa: D102
        return True

    @property
    def needs_clean_up(self) -> bool:  # noqa: D102
        return False

    @property
    def needs_descriptor(self) -> bool:  # noqa: D102
        return False

    @property
    def packs_below(self) -> int:  # noqa: D102
        return self._region_nbytes // 2

    @property
    def region_nbytes(self) -> int:  # noqa: D102
        return self._region_nbytes

    def create(  # noqa: D102
        self, nbytes: int, content: memoryview | None = None, intend: Intend = nobody
    ) -> SegmentSource:
        return anonymous.create_sealed(nbytes, content, strategy=self.name, headroom=self._headroom)

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:  # noqa: D102
        return anonymous.adopt_sealed(fd, nbytes, strategy=self.name)

    def map(self, source: SegmentSource, access: Access) -> Mapping:  # noqa: D102
        return map_whole(source.fd, source.nbytes, access)
