"""Anonymous memory: sealed memfds, for the strategies that use them.

Some facts about memfd (memfd_create(2), fcntl(2) "File Sealing", shmem.c):

* a memfd has no name that could be left behind: the system frees it with its last descriptor and mapping,
  whatever was killed.  /dev/shm's size does not limit it; memory and the container's limit do;
* without seals any process that has it could shrink it, and a process that touches a page behind the new
  end dies of SIGBUS.  F_SEAL_SHRINK | F_SEAL_GROW make that impossible, F_SEAL_SEAL keeps others from adding
  F_SEAL_WRITE, which would break later mappings;
* a descriptor that was opened O_RDONLY through /proc/self/fd cannot be mapped for writing, nor can
  ``mprotect`` make its mapping writable: that is what "read-only" means here;
* F_GET_SEALS works on such a descriptor too, so every receiver can check;
* from Linux 6.3 a memfd should say whether it may be executed, and some machines insist
  (sysctl vm.memfd_noexec); older kernels refuse the flag with EINVAL.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from functools import lru_cache

from nbparallel.errors import InvalidHandleError
from nbparallel.sharing.memory.mapping import Access, Content, Mapping
from nbparallel.sharing.memory.memory_limits import MemoryGuard
from nbparallel.sharing.strategies.page_allocation import explained, fill, map_whole, whole_pages
from nbparallel.sharing.strategies.strategy import REGION_NBYTES, Intend, SegmentSource, Strategy, no_session

MFD_NOEXEC_SEAL = 0x8
"""Not in `os` before Python 3.14."""


class FileDescriptorStrategy(Strategy):
    """Sealed memfds; the default on Linux."""

    name = "file_descriptor"

    def __init__(self, guard: MemoryGuard | None = None) -> None:
        self._guard = guard or MemoryGuard()

    # docstrings inherited

    @property
    def unavailable_reason(self) -> str | None:
        if not hasattr(os, "memfd_create"):
            return f"this Python has no os.memfd_create (on {sys.platform}; Linux has it from glibc 2.27 on)"
        return _refusal()

    needs_clean_up = False

    def create(
        self, nbytes: int, content: Content | None = None, intend: Intend = no_session
    ) -> SegmentSource:
        size, name = whole_pages(nbytes), self.name
        self._guard.require(size)
        try:
            # Owned immediately, so that nothing that is raised from here on leaves it open.
            source = SegmentSource(_memfd(f"nbp-{os.getpid()}"), size, name)
            fill(source.fd, size, content)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(source.fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            raise explained(error, size) from error
        return source

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:
        try:
            _check(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return SegmentSource(fd, nbytes, self.name)

    def map(self, source: SegmentSource, access: Access) -> Mapping:
        return map_whole(source.fd, source.nbytes, access)


@lru_cache(maxsize=1)
def _refusal() -> str | None:
    """Return why the system makes no anonymous memory, asked once."""
    try:
        os.close(_memfd("nbp-probe"))
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            return f"this system refuses memfd_create ({error.strerror}); a container's seccomp profile may"
    return None  # too many open files: that is for later


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _check(fd: int, nbytes: int) -> None:
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
        raise InvalidHandleError("a segment is not sealed: another process could truncate it under its users")


# The strategy `file_region`: many arrays in one large region.
#
# Every strategy packs small arrays (see `Region`); this one packs all but the very large, so that tens of
# thousands of them cost no more descriptors, mappings and entries in the supervisor's ledger than a few.  The
# price: the memory of arrays that other processes have seen is freed with the last array of its region, not
# array by array.


class FileRegionStrategy(FileDescriptorStrategy):
    """Large sealed memfds that hold arrays of up to half their size."""

    # docstrings inherited

    name = "file_region"
    packs_below = REGION_NBYTES // 2
