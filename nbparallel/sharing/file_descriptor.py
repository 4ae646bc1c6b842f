"""The strategy `file_descriptor`: anonymous memory behind a descriptor.

Some facts about memfd (memfd_create(2), fcntl(2) "File Sealing", fallocate(2), shmem.c):

* a memfd has no name that could be left behind: the system frees it with its last descriptor and mapping,
  whatever was killed.  /dev/shm's size does not limit it; memory and the container's limit do;
* without seals any process that has it could shrink it, and whoever touches a page behind the new end dies
  of SIGBUS.  F_SEAL_SHRINK | F_SEAL_GROW make that impossible, F_SEAL_SEAL keeps others from adding
  F_SEAL_WRITE, which would break later mappings;
* pages come into being when touched, and if there is no memory then, that too is SIGBUS: so they are
  reserved first.  ``posix_fallocate`` zeroes them; ``pwrite`` of whole pages needs no zeroing and no page
  fault, which makes the first copy of an array 20 % cheaper.  ``fallocate`` is undone and begun again when
  a signal arrives, so it is called in steps;
* a descriptor that was opened O_RDONLY through /proc/self/fd cannot be mapped for writing, nor can
  ``mprotect`` make its mapping writable: that is what "read-only" means here;
* F_GET_SEALS works on such a descriptor too, so every receiver can check;
* from Linux 6.3 a memfd should say whether it may be executed, and some machines insist
  (sysctl vm.memfd_noexec); older kernels refuse the flag with EINVAL;
* Python's `mmap` keeps a duplicate of the descriptor until 3.12 (``trackfd=False`` from 3.13): an own
  segment costs two descriptors there, a fetched one costs one.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from typing import Any

from nbparallel.errors import FileDescriptorLimitError, InvalidHandleError, SharedMemoryFullError
from nbparallel.sharing.headroom import Headroom, full_error, size_text
from nbparallel.sharing.mapping import Access, Mapping
from nbparallel.sharing.strategy import SegmentSource, Strategy

RESERVE_STEP = 64 << 20
"""Bytes reserved by one call, about 20 ms: signals are answered in between."""
MFD_NOEXEC_SEAL = 0x8
"""Not in `os` before Python 3.14."""


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
        return None if hasattr(os, "memfd_create") else f"{sys.platform} has no memfd_create (Linux has)"

    @property
    def supports_read_only(self) -> bool:  # noqa: D102
        return True

    @property
    def needs_clean_up(self) -> bool:  # noqa: D102
        return False

    @property
    def needs_descriptor(self) -> bool:  # noqa: D102
        return True

    def create(self, nbytes: int, content: memoryview | None = None) -> SegmentSource:  # noqa: D102
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._headroom.require(size)
        name = self.name
        try:
            # Owned at once, so that nothing that is raised from here on leaves it open.
            source = SegmentSource(_memfd(f"nbp-{os.getpid()}"), size, name)
            if content is None:
                _reserve(source.fd, size)
            else:
                os.ftruncate(source.fd, size)
                _write(source.fd, content)
                # What the content did not touch; the page it ends in exists already.
                _reserve(source.fd, size, start=content.nbytes)
            _seal(source.fd)
        except OSError as error:
            raise _explained(error, size) from error
        return source

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:  # noqa: D102
        try:
            _check(fd, nbytes)
            name = self.name
        except BaseException:
            os.close(fd)
            raise
        return SegmentSource(fd, nbytes, name)

    def map(self, source: SegmentSource, access: Access) -> Mapping:  # noqa: D102
        # An untracked descriptor is one less for every mapping, where Python offers it.
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        flags = mmap.MAP_PRIVATE if access is Access.PRIVATE else mmap.MAP_SHARED
        prot = mmap.PROT_READ if access is Access.READ else mmap.PROT_READ | mmap.PROT_WRITE
        try:
            memory = mmap.mmap(source.fd, source.nbytes, flags, prot, **options)
        except OSError as error:
            raise _explained(error, source.nbytes) from error
        if hasattr(mmap, "MADV_DONTDUMP"):
            # A crash of one rank must not write gigabytes of everybody's arrays into a core file.
            memory.madvise(mmap.MADV_DONTDUMP)
        return Mapping(memory, access)


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _reserve(fd: int, size: int, start: int = 0) -> None:
    while start < size:
        step = min(RESERVE_STEP, size - start)
        os.posix_fallocate(fd, start, step)
        start += step


def _write(fd: int, content: memoryview) -> None:
    offset, nbytes = 0, content.nbytes
    while offset < nbytes:
        # One call writes at most 2 GiB less a page (write(2)); a signal may cut it short.
        offset += os.pwrite(fd, content[offset : offset + RESERVE_STEP], offset)


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


def _explained(error: OSError, nbytes: int) -> OSError | SharedMemoryFullError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return descriptor_error(error)
    if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
        where = (
            "this process (limits: `ulimit -v`, vm.max_map_count)"
            if error.errno == errno.ENOMEM
            else "this machine"
        )
        return full_error(nbytes, None, where)
    return OSError(
        error.errno, f"a shared segment of {size_text(nbytes)} could not be made: {error.strerror}"
    )


def descriptor_error(error: OSError) -> FileDescriptorLimitError:
    """Return the error that names the limit of open files and what to do."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    whose = f"this process ({soft} of at most {hard})" if error.errno == errno.EMFILE else "this machine"
    return FileDescriptorLimitError(
        error.errno,
        f"too many open files for {whose}: every shared array needs a descriptor or two; delete shared "
        "arrays, put small ones into one large array, or raise the limit (`ulimit -n`)",
    )
