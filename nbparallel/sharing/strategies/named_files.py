"""Strategies whose segments are files: `file_system` in memory, `mmap` on a disk."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from abc import abstractmethod
from typing import Any

from nbparallel.errors import (
    ForkedRankError,
    InvalidHandleError,
    NbParallelError,
    StrategyUnavailableError,
)
from nbparallel.sharing.memory.mapping import (
    Access,
    Content,
    Mapping,
)
from nbparallel.sharing.memory.memory_limits import MemoryGuard
from nbparallel.sharing.strategies.page_allocation import (
    SegmentDirectory,
    explained,
    fill,
    map_whole,
    whole_pages,
)
from nbparallel.sharing.strategies.strategy import Intend, SegmentSource, Strategy, no_session, process_names
from nbparallel.wire.locked_names import ON_DISK, file_system_of, hold

# Named files: how a strategy whose segments have names makes and checks them.
#
# Some facts (open(2), shm_overview(7), statfs(2)):
#
# * ``O_EXCL`` fails if there is a file or a link of that name; ``O_NOFOLLOW`` refuses a link that is put
#   there later.  The mode is set with ``fchmod``, because the umask may take bits away;
# * files in memory (tmpfs) count against their mount's size, by default half of memory, 64 MB in Docker.
#   ``posix_fallocate`` fails cleanly when it is used up;
# * files cannot be sealed: a process that may open one may truncate it, which kills processes that map it
#   (SIGBUS).  Only processes of the same user may.

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "coda", "gfs2", "glusterfs"}
    | {"lustre", "ncpfs", "beegfs", "gpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone"}
    | {"fuse.gcsfuse", "fuse.ceph", "fuse.drive", "panfs", "pvfs2", "wekafs"}
)
"""Kinds of file systems, as /proc/self/mountinfo calls them, whose files live on another machine."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 3
"""Attempts to draw an unused random name: after three collisions assume another program."""


def network_reason(path: str) -> str | None:
    """Return why files there are not shared, if it lies on a network file system, else None."""
    kind = file_system_of(path)
    if kind not in NETWORK_FILE_SYSTEMS:
        return None
    return (
        f"{path} lies on a network file system ({kind}), where what one machine writes another may not see, "
        "and a full disk kills instead of raising: use a local disk, or pass allow_network=True"
    )


def unusable_reason(directory: str) -> str | None:
    """Return why no files can be made in a directory, or None."""
    if not os.path.isdir(directory):
        return f"there is no directory {directory} here ({sys.platform})"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} may not be written to by this user"
    return None


class NamedFiles(Strategy):
    """A strategy whose segments are files in a directory, with names."""

    # docstrings inherited

    needs_clean_up = True
    _guard: MemoryGuard | None = None
    """Of memory, if a file takes some."""
    _of_others = False
    """Whether a file may be another user's."""

    @abstractmethod
    def _place(self) -> SegmentDirectory:
        """Return where files are, with the remedy for its being full."""

    def create(
        self, nbytes: int, content: Content | None = None, intend: Intend = no_session
    ) -> SegmentSource:
        size, directory = whole_pages(nbytes), self._place()
        if self._guard is not None:
            self._guard.require(size)
        directory.require(size)
        try:
            source = self._create(directory.path, size, intend)
            try:
                os.fchmod(source.fd, 0o600)
                fill(source.fd, size, content)
            except BaseException:
                source.close()
                raise
        except NbParallelError:
            raise  # some of them are OSErrors as well
        except OSError as error:
            raise explained(error, size, directory) from error
        return source

    def _create(self, directory: str, size: int, intend: Intend) -> SegmentSource:
        path, pid = "", os.getpid()
        for _ in range(_TRIES):
            path = os.path.join(directory, process_names.draw())
            intend(path)
            process_names.claim(path)
            if os.getpid() != pid:
                # A signal handler forked here and returned in the child as well: the name is the parent's.
                raise ForkedRankError(
                    f"this process ({os.getpid()}) was forked from {pid}, which alone may share arrays"
                )
            # Owned before it exists: whatever falls in between, closing removes the name.
            source = SegmentSource(-1, size, self.name, path)
            try:
                source.fd = os.open(path, _FLAGS, 0o600)
            except FileExistsError:
                source.path = ""  # another's
                process_names.disclaim(path)
                process_names.change_stem()  # a program that saw our names can guess the next
            except BaseException:
                source.close()
                raise
            else:
                if hold(source.fd):
                    return source
                source.close()
        raise FileExistsError(
            errno.EEXIST,
            f"{_TRIES} random names in a row were taken, the last one was {path}: a program puts files "
            "there; file_descriptor needs no names",
        )

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or not (self._of_others or status.st_uid == os.geteuid()):
                raise InvalidHandleError("a segment's descriptor is no file of this user")
            if status.st_size != nbytes:
                raise InvalidHandleError(f"a segment of {nbytes} bytes was announced, {status.st_size} came")
        except BaseException:
            os.close(fd)
            raise
        return SegmentSource(fd, nbytes, self.name)

    def map(self, source: SegmentSource, access: Access) -> Mapping:
        return map_whole(source.fd, source.nbytes, access)


# The strategy `file_system`: named POSIX shared memory.
#
# A segment is a file in /dev/shm that any process of this user can open by its name.  The
# size of /dev/shm limits it, and its name has to be removed: see `supervisor.ledger`, note [names].

DIRECTORY = "/dev/shm"
"""Where `shm_open` puts names on Linux (shm_overview(7))."""


class FileSystemStrategy(NamedFiles):
    """Named shared memory under `directory`."""

    def __init__(self, directory: str = DIRECTORY) -> None:
        self._directory = directory
        self._guard = MemoryGuard()

    # docstrings inherited

    name = "file_system"

    @property
    def unavailable_reason(self) -> str | None:
        return unusable_reason(self._directory)

    def _place(self) -> SegmentDirectory:
        remedy = "use `%sharing_strategy file_descriptor`, or make it larger (Docker: --shm-size)"
        return SegmentDirectory(self._directory, remedy)


# The strategy `mmap`: files on a disk.
#
# A segment is a file in a directory of the user's choice.  Unused parts are on the disk only, so arrays may
# be larger than memory.  The files that this strategy makes are temporary and removed as names in /dev/shm
# are; `nbparallel.from_file` shares a file that the user keeps.
#
# Some facts about files that several processes map (mmap(2), nfs(5), posix_fallocate(3)):
#
# * on one machine all mappings of a file show the same pages, whether they have been written back or not;
# * over a network that does not hold between machines, a write may fail long after it was made, and
#   ``posix_fallocate`` is imitated by writing, which races with others: so network file systems are refused;
# * truncating a file kills processes that map it (SIGBUS), and files cannot be sealed.


class MemoryMapStrategy(NamedFiles):
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

    _of_others = True  # the user may have opened it

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

    def _place(self) -> SegmentDirectory:
        remedy = 'choose another disk: nbp.set_sharing_strategy("mmap", directory=…)'
        return SegmentDirectory(self.directory, remedy)


def _why_not(directory: str, *, allow_network: bool) -> str | None:
    return unusable_reason(directory) or (None if allow_network else network_reason(directory))
