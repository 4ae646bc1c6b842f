"""The strategy `mmap`: files on a disk.

A segment is a file in a directory of the user's choice.  Unused parts are on the disk only, so arrays may be
larger than memory.  The files that this strategy makes are temporary and removed as names in /dev/shm are;
`nbparallel.from_file` shares a file that the user keeps.

Some facts about files that several processes map (mmap(2), nfs(5), posix_fallocate(3)):

* on one machine all mappings of a file show the same pages, whether they have been written back or not;
* over a network that does not hold between machines, a write may fail long after it was made, and
  ``posix_fallocate`` is imitated by writing, which races with others: so network file systems are refused;
* truncating a file kills processes that map it (SIGBUS), and files cannot be sealed.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from nbparallel.errors import StrategyUnavailableError
from nbparallel.sharing.memory.mapping import Access, Content, Mapping
from nbparallel.sharing.strategies.page_allocation import (
    SegmentDirectory,
    adopt_named,
    create_named,
    map_whole,
    network_reason,
)
from nbparallel.sharing.strategies.strategy import Intend, SegmentSource, Strategy, no_session
from nbparallel.wire.locked_names import ON_DISK


class MemoryMapStrategy(Strategy):
    """Files in a directory, ``directory=``; with ``allow_network=True`` it may be another machine's."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._allow_network = False

    # docstrings inherited

    name = "mmap"

    @property
    def directory(self) -> str:
        """Where temporary files go."""
        if self._directory is not None:
            return self._directory
        return ON_DISK if os.access(ON_DISK, os.W_OK | os.X_OK) else tempfile.gettempdir()

    @property
    def unavailable_reason(self) -> str | None:
        return _why_not(self.directory, allow_network=self._allow_network)

    needs_clean_up = True

    @property
    def options(self) -> dict[str, Any]:
        if self._directory is None:
            return {}
        return {"directory": self._directory, "allow_network": self._allow_network}

    def configure(
        self,
        *,
        directory: str | os.PathLike[str] | None = None,
        allow_network: bool = False,
        **options: Any,
    ) -> None:
        """Choose where new files go, and whether that may be on another machine; nothing else."""
        super().configure(**options)
        path = os.path.realpath(self.directory if directory is None else os.fspath(directory))
        reason = _why_not(path, allow_network=allow_network)
        if reason is not None:
            raise StrategyUnavailableError(f"sharing strategy 'mmap' cannot use {path}: {reason}")
        self._directory, self._allow_network = path, allow_network

    def create(
        self, nbytes: int, content: Content | None = None, intend: Intend = no_session
    ) -> SegmentSource:
        return create_named(
            disk_directory(self.directory), nbytes, content, intend, strategy=self.name, guard=None
        )

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:
        # A file that the user opened may be another user's.
        return adopt_named(fd, nbytes, strategy=self.name, own=False)

    def map(self, source: SegmentSource, access: Access) -> Mapping:
        return map_whole(source.fd, source.nbytes, access)


def disk_directory(directory: str) -> SegmentDirectory:
    """Return a directory on a disk, with the remedy for a full one."""
    return SegmentDirectory(directory, 'choose another disk: nbp.set_sharing_strategy("mmap", directory=…)')


def _why_not(directory: str, *, allow_network: bool) -> str | None:
    if not os.path.isdir(directory):
        return f"there is no directory {directory}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} may not be written to by this user"
    return None if allow_network else network_reason(directory)
