"""The strategy `file_descriptor`: anonymous memory behind a descriptor; see `anonymous` for how."""

from __future__ import annotations

from nbparallel.sharing import anonymous
from nbparallel.sharing.headroom import Headroom
from nbparallel.sharing.mapping import Access, Mapping
from nbparallel.sharing.reserving import map_whole
from nbparallel.sharing.strategy import Intend, SegmentSource, Strategy, nobody


class FileDescriptorStrategy(Strategy):
    """Sealed memfds; the default on Linux."""

    def __init__(self, headroom: Headroom | None = None) -> None:
        self._headroom = headroom or Headroom()

    # docstrings inherited

    @property
    def name(self) -> str:  # noqa: D102
        return "file_descriptor"

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
        return True

    def create(  # noqa: D102
        self, nbytes: int, content: memoryview | None = None, intend: Intend = nobody
    ) -> SegmentSource:
        return anonymous.create_sealed(nbytes, content, strategy=self.name, headroom=self._headroom)

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:  # noqa: D102
        return anonymous.adopt_sealed(fd, nbytes, strategy=self.name)

    def map(self, source: SegmentSource, access: Access) -> Mapping:  # noqa: D102
        return map_whole(source.fd, source.nbytes, access)
