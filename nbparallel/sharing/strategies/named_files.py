"""Named files: how a strategy whose segments have names makes and checks them.

Some facts (open(2), shm_overview(7), statfs(2)):

* ``O_EXCL`` fails if there is a file or a link of that name; ``O_NOFOLLOW`` refuses a link that is put
  there later.  The mode is set with ``fchmod``, because the umask may take bits away;
* files in memory (tmpfs) count against their mount's size, by default half of memory, 64 MB in Docker.
  ``posix_fallocate`` fails cleanly when it is used up;
* files cannot be sealed: a process that may open one may truncate it, which kills processes that map it
  (SIGBUS).  Only processes of the same user may.
"""

from __future__ import annotations

import errno
import os
import stat

from nbparallel.errors import ForkedRankError, InvalidHandleError, NbParallelError
from nbparallel.sharing.memory.mapping import Content
from nbparallel.sharing.memory.memory_limits import MemoryGuard
from nbparallel.sharing.strategies.owned_names import process_names
from nbparallel.sharing.strategies.page_allocation import SegmentDirectory, explained, fill, whole_pages
from nbparallel.sharing.strategies.strategy import Intend, SegmentSource
from nbparallel.wire.locked_names import file_system_of, hold

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "coda", "gfs2", "glusterfs"}
    | {"lustre", "ncpfs", "beegfs", "gpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone"}
    | {"fuse.gcsfuse", "fuse.ceph", "fuse.drive", "panfs", "pvfs2", "wekafs"}
)
"""Kinds of file systems, as /proc/self/mountinfo calls them, whose files live on another machine."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 3
"""Attempts to draw an unused random name: after three collisions assume another program."""


def create_named(
    directory: SegmentDirectory,
    nbytes: int,
    content: Content | None,
    intend: Intend,
    *,
    strategy: str,
    guard: MemoryGuard | None,
) -> SegmentSource:
    """Make a file in `directory`, every page of it reserved; errors as `Strategy.create`.

    Parameters
    ----------
    guard : MemoryGuard, optional
        Of memory, if the file takes some.
    """
    size = whole_pages(nbytes)
    if guard is not None:
        guard.require(size)
    directory.require(size)
    try:
        source = _create(directory.path, size, intend, strategy)
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


def _create(directory: str, size: int, intend: Intend, strategy: str) -> SegmentSource:
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
        source = SegmentSource(-1, size, strategy, path)
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
        f"{_TRIES} random names in a row were taken, the last one was {path}: a program puts files there; "
        "file_descriptor needs no names",
    )


def adopt_named(fd: int, nbytes: int, *, strategy: str, own: bool) -> SegmentSource:
    """Take over a descriptor if it is a file of this size (and, if `own`, of this user)."""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or (own and status.st_uid != os.geteuid()):
            raise InvalidHandleError("a segment's descriptor is no file of this user")
        if status.st_size != nbytes:
            raise InvalidHandleError(f"a segment of {nbytes} bytes was announced, {status.st_size} came")
    except OSError as error:
        os.close(fd)
        raise explained(error, nbytes) from error
    except BaseException:
        os.close(fd)
        raise
    return SegmentSource(fd, nbytes, strategy)


def network_reason(path: str) -> str | None:
    """Return why files there are not shared, if it lies on a network file system, else None."""
    kind = file_system_of(path)
    if kind not in NETWORK_FILE_SYSTEMS:
        return None
    return (
        f"{path} lies on a network file system ({kind}), where what one machine writes another may not see, "
        "and a full disk kills instead of raising: use a local disk, or pass allow_network=True"
    )
