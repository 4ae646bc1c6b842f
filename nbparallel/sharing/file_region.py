"""The strategy `file_region`: many arrays in one large region.

A region is anonymous memory (see `anonymous`); arrays are packed into it one after the other.  All arrays
of a region share one descriptor, one mapping and one entry in the supervisor's ledger, so that tens of
thousands of them cost no more than one.  The price: a region goes when the last of its arrays has gone, not
array by array.
"""

from __future__ import annotations

from nbparallel.sharing import anonymous
from nbparallel.sharing.headroom import Headroom
from nbparallel.sharing.mapping import Access, Mapping
from nbparallel.sharing.reserving import map_whole
from nbparallel.sharing.strategy import Intend, SegmentSource, Strategy, nobody

REGION_NBYTES = 16 << 20
"""Reserved at once; an array of more than half of it gets a region of its own."""


class FileRegionStrategy(Strategy):
    """Large sealed memfds, filled from the front."""

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
