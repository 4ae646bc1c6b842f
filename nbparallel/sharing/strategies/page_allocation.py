"""Page allocation: reserve, write and map the pages of a segment, and explain what failed.

Some facts (posix_fallocate(3), pwrite(2), mmap(2)):

* pages of a file in memory, and blocks of one on a disk, come into being when touched; if there is none
  left then, the process gets SIGBUS.  So they are reserved first.  ``posix_fallocate`` zeroes them;
  ``pwrite`` of whole pages needs no zeroing and no page fault: the first copy takes half of the time;
* ``fallocate`` is undone and begun again when a signal arrives, so it is called in steps.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from dataclasses import dataclass

from nbparallel.errors import (
    FileDescriptorLimitError,
    SharedMemoryFullError,
    StrategyUnavailableError,
)
from nbparallel.sharing.memory.mapping import (
    Access,
    Content,
    Mapping,
    advise,
    map_file,
    parts_of,
    reserve_huge,
)
from nbparallel.sharing.memory.memory_limits import DELETE_ARRAYS, descriptor_error, full_error
from nbparallel.wire.locked_names import file_system_of
from nbparallel.wire.units import size_text

# Segment directory: where files are segments, and what to do when it is full.


@dataclass(frozen=True, slots=True)
class SegmentDirectory:
    """A directory whose files are segments, as errors name it."""

    path: str
    """Absolute path."""
    remedy: str
    """What to do when it is full."""
    first: str = DELETE_ARRAYS
    """What to do first."""

    def require(self, nbytes: int) -> None:
        """Return if a file of `nbytes` bytes seems to fit; whether it does, only `posix_fallocate` knows.

        Raises
        ------
        SharedMemoryFullError
            It does not; the message has the numbers.
        """
        extent = os.statvfs(self.path)
        if extent.f_files and not extent.f_favail:
            raise SharedMemoryFullError(
                f"no file can be added to {self}: all {extent.f_files} names that it can hold are taken; "
                f"{self.first}, or {self.remedy}"
            )
        free = extent.f_bavail * extent.f_frsize
        if free < nbytes:
            # Raised as it is made: an error that a variable of its own traceback holds is a cycle, which
            # would keep the caller's arrays alive until the garbage collector runs.
            raise full_error(nbytes, free, str(self), self.remedy, self.first)

    def full_error(self, nbytes: int) -> SharedMemoryFullError:
        """Return the error for a file that the system has just refused because the directory is full."""
        try:
            self.require(nbytes)
        except SharedMemoryFullError as error:
            return error
        # What is free by now need not be what was missing: other files come and go.
        where = f"{self}, which a moment ago was too full"
        return full_error(nbytes, None, where, self.remedy, self.first)

    def __str__(self) -> str:
        extent = os.statvfs(self.path)
        kind = file_system_of(self.path) or "file system"
        return f"{self.path} ({kind} of {size_text(extent.f_blocks * extent.f_frsize)})"


RESERVE_STEP = 64 << 20
"""Bytes reserved by one call, about 20 ms: signals are answered in between."""


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages.

    >>> whole_pages(1) == mmap.PAGESIZE
    True
    """
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def fill(fd: int, size: int, content: Content | None) -> None:
    """Give an empty file its size and content, every page of it reserved."""
    huge = reserve_huge(fd, size)
    if content is None:
        if not huge:
            reserve(fd, size)
        return
    os.ftruncate(fd, size)
    written = 0
    for part in parts_of(content):
        _write(fd, part, written)
        written += part.nbytes
    # What the content did not touch; the page it ends in exists already.
    reserve(fd, size, start=written)


def reserve(fd: int, size: int, start: int = 0) -> None:
    """Reserve every page from `start` to `size`."""
    while start < size:
        step = min(RESERVE_STEP, size - start)
        os.posix_fallocate(fd, start, step)
        start += step


def _write(fd: int, content: memoryview, start: int) -> None:
    written, nbytes = 0, content.nbytes
    while written < nbytes:
        # One call writes at most 2 GiB less a page (write(2)); a signal may cut it short.
        written += os.pwrite(fd, content[written : written + RESERVE_STEP], start + written)


def map_whole(fd: int, nbytes: int, access: Access) -> Mapping:
    """Map all of a segment into this process."""
    flags = mmap.MAP_PRIVATE if access is Access.PRIVATE else mmap.MAP_SHARED
    prot = mmap.PROT_READ if access is Access.READ else mmap.PROT_READ | mmap.PROT_WRITE
    try:
        memory, address = map_file(fd, nbytes, flags, prot)
    except OSError as error:
        raise explained(error, nbytes) from error
    advise(memory, fd)
    return Mapping(memory, access, address)


def explained(
    error: OSError, nbytes: int, directory: SegmentDirectory | None = None
) -> FileDescriptorLimitError | SharedMemoryFullError | StrategyUnavailableError:
    """Return the error that says what failed, and what to do; `directory`: of a file."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return descriptor_error(error)
    if error.errno == errno.ENOMEM:
        return full_error(
            nbytes, None, "this process", "raise the limit of it (`ulimit -v`, vm.max_map_count)"
        )
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            where = f"this process, whose files may have {size_text(limit)}: shared memory counts as one"
            return full_error(nbytes, None, where, "raise the limit of it (`ulimit -f`)")
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return full_error(nbytes, None, "this machine") if directory is None else directory.full_error(nbytes)
    return StrategyUnavailableError(
        error.errno,
        f"a shared segment of {size_text(nbytes)} could not be made or mapped ({error.strerror}): try "
        "another sharing strategy, `%sharing_strategy` lists them",
    )
