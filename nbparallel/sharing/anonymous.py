"""Anonymous memory: sealed memfds, for the strategies that use them.

Some facts about memfd (memfd_create(2), fcntl(2) "File Sealing", shmem.c):

* a memfd has no name that could be left behind: the system frees it with its last descriptor and mapping,
  whatever was killed.  /dev/shm's size does not limit it; memory and the container's limit do;
* without seals any process that has it could shrink it, and whoever touches a page behind the new end dies
  of SIGBUS.  F_SEAL_SHRINK | F_SEAL_GROW make that impossible, F_SEAL_SEAL keeps others from adding
  F_SEAL_WRITE, which would break later mappings;
* a descriptor that was opened O_RDONLY through /proc/self/fd cannot be mapped for writing, nor can
  ``mprotect`` make its mapping writable: that is what "read-only" means here;
* F_GET_SEALS works on such a descriptor too, so every receiver can check;
* from Linux 6.3 a memfd should say whether it may be executed, and some machines insist
  (sysctl vm.memfd_noexec); older kernels refuse the flag with EINVAL.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from nbparallel.errors import InvalidHandleError
from nbparallel.sharing.headroom import Headroom
from nbparallel.sharing.reserving import explained, fill, whole_pages
from nbparallel.sharing.strategy import SegmentSource

MFD_NOEXEC_SEAL = 0x8
"""Not in `os` before Python 3.14."""


def missing_reason() -> str | None:
    """Return why there is no anonymous memory here, or None."""
    return None if hasattr(os, "memfd_create") else f"{sys.platform} has no memfd_create (Linux has)"


def create_sealed(
    nbytes: int, content: memoryview | None, *, strategy: str, headroom: Headroom
) -> SegmentSource:
    """Make anonymous memory, reserved and sealed; errors as `Strategy.create`."""
    size = whole_pages(nbytes)
    headroom.require(size)
    try:
        # Owned at once, so that nothing that is raised from here on leaves it open.
        source = SegmentSource(_memfd(f"nbp-{os.getpid()}"), size, strategy)
        fill(source.fd, size, content)
        _seal(source.fd)
    except OSError as error:
        raise explained(error, size) from error
    return source


def adopt_sealed(fd: int, nbytes: int, *, strategy: str) -> SegmentSource:
    """Take over a descriptor if it is sealed memory of this size; errors as `Strategy.adopt`."""
    try:
        _check(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise explained(error, nbytes) from error
    except BaseException:
        os.close(fd)
        raise
    return SegmentSource(fd, nbytes, strategy)


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _seal(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _check(fd: int, nbytes: int) -> None:
    import fcntl

    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise InvalidHandleError("a segment's descriptor is no memory of this user")
    if status.st_size != nbytes:
        raise InvalidHandleError(f"a segment of {nbytes} bytes was announced, {status.st_size} came")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidHandleError("a segment's descriptor is no memfd") from error
    if ~seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
        raise InvalidHandleError("a segment is not sealed: somebody could cut it off under its users")
