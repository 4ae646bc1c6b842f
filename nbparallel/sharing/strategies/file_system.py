"""The strategy `file_system`: named POSIX shared memory.

A segment is a file in /dev/shm that any process of this user can open by its name.  The
size of /dev/shm limits it, and its name has to be removed: see `supervisor.ledger`, note [names].
"""

from __future__ import annotations

import os
import sys

from nbparallel.sharing.memory.mapping import Access, Content, Mapping
from nbparallel.sharing.memory.memory_limits import MemoryGuard
from nbparallel.sharing.strategies.page_allocation import (
    SegmentDirectory,
    adopt_named,
    create_named,
    map_whole,
)
from nbparallel.sharing.strategies.strategy import Intend, SegmentSource, Strategy, no_session

DIRECTORY = "/dev/shm"
"""Where `shm_open` puts names on Linux (shm_overview(7))."""


class FileSystemStrategy(Strategy):
    """Named shared memory under `directory`."""

    def __init__(self, directory: str = DIRECTORY, guard: MemoryGuard | None = None) -> None:
        self._directory = directory
        self._guard = guard or MemoryGuard()

    # docstrings inherited

    name = "file_system"

    @property
    def unavailable_reason(self) -> str | None:
        if not os.path.isdir(self._directory):
            return f"there is no directory {self._directory} here ({sys.platform})"
        if not os.access(self._directory, os.W_OK | os.X_OK):
            return f"{self._directory} may not be written to by this user"
        return None

    needs_clean_up = True

    def create(
        self, nbytes: int, content: Content | None = None, intend: Intend = no_session
    ) -> SegmentSource:
        directory = SegmentDirectory(
            self._directory, "use `%sharing_strategy file_descriptor`, or make it larger (Docker: --shm-size)"
        )
        return create_named(directory, nbytes, content, intend, strategy=self.name, guard=self._guard)

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:
        return adopt_named(fd, nbytes, strategy=self.name, own=True)

    def map(self, source: SegmentSource, access: Access) -> Mapping:
        return map_whole(source.fd, source.nbytes, access)
