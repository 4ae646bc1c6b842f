"""Write-protection of pages whose first writes the system notes, and finds again: userfaultfd, PAGEMAP_SCAN.

Some facts (userfaultfd(2), PAGEMAP_SCAN(2const), Documentation/admin-guide/mm/userfaultfd.rst); each has a
test in tests/distributed/races/recording:

* with UFFD_FEATURE_WP_ASYNC (Linux 6.7) the system itself removes the write-protection of a page at its
  first write and lets the write go on: no process has to answer.  What is no longer protected was written.
  UFFD_USER_MODE_ONLY needs no right, and what the kernel writes for this process, as read(2) does, counts;
* the protection is in the page table: other processes that map the same memory write unseen, and unhindered;
* with that feature alone any memory can be protected, files on a disk too.  Only what can never become
  writable here (of a descriptor that was opened for reading) is refused, with EPERM: no process writes there;
* pages that were never touched are protected by markers in the page table, 2 MiB of it for each GiB.  No
  neighbours are entered with a page of memory that is watched, so first reads are dearer, too.  When the
  protection is removed, every page is made read-only for the system's own sake: its next write is a fault
  once more, a microsecond (all of it measured by benchmarks/races/pages.py);
* PAGEMAP_SCAN protects small pages in less time than UFFDIO_WRITEPROTECT, if it has no output.  It is asked
  for every page: some kernels pass over untouched memory if only the written ones are wanted;
* asked for PAGE_IS_WRITTEN and nothing else it scans many times as fast as with a second flag.  But it calls
  all written that was never watched: PM_SCAN_CHECK_WPASYNC refuses a range which has such memory;
* MADV_DONTNEED, MADV_PAGEOUT and MADV_COLLAPSE take no page's state away in a shared mapping (in private
  memory, what MADV_DONTNEED drops counts as written);
* PAGEMAP_SCAN leaves a huge page huge, and one byte then makes 2 MiB written: so these are found first, and
  protected by UFFDIO_WRITEPROTECT, which enters them as small ones.  They stay so after the watch, in this
  process; MADV_DONTNEED of a shared mapping makes the next touch enter them as huge again;
* a forked child inherits the descriptors, not the protection.  Both descriptors go on acting on the parent's
  memory, whichever process uses them, so the child closes them.  They would also keep the protection, for
  which reason it is removed before they are closed;
* a killed process leaves nothing: protection goes with the page table.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from typing import TypeAlias

Range = tuple[int, int]
"""First address, and one past the last."""
SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282, "riscv64": 282}.get(platform.machine(), -1)
"""Machines on which write-protection for userfaultfd exists; their ioctl numbers are the same."""
_USER_MODE_ONLY = 1
_API = 0xAA
_FEATURES = 1 << 15 | 1 << 13 | 1 << 12
"""WP_ASYNC; WP_UNPOPULATED: memory never touched; WP_HUGETLBFS_SHMEM: memory that is shared."""
UFFDIO_API, UFFDIO_REGISTER, _UFFDIO_UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_UFFDIO_WRITEPROTECT = 0xC018AA06
_REGISTER_WP, _WRITEPROTECT_WP = 2, 1
PAGEMAP_SCAN = 0xC0606610
_WP_MATCHING, _CHECK_WPASYNC = 1, 2
_WPALLOWED, _WRITTEN, _HUGE = 1, 2, 64
_SCAN = struct.Struct("=12Q")
"""``struct pm_scan_arg``; its first field is its size."""
_WALK_END = 4
_REGIONS = 4096
"""Stretches of written pages that one call returns, 96 KiB; arbitrary."""
_Vector: TypeAlias = "ctypes.Array[ctypes.c_uint64]"
"""Three words for each stretch: first address, one past the last, bits."""


class WriteProtection:
    """Two descriptors, and the protection that this process has through them.

    Raises
    ------
    OSError
        The system has no such thing, or refuses it: EINVAL and ENOTTY if it is too old.
    """

    def __init__(self) -> None:
        self.pagemap = -1
        self.userfaultfd = _open_userfaultfd()
        try:
            _control(self.userfaultfd, UFFDIO_API, struct.pack("=3Q", _API, _FEATURES, 0))
            self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def protect(self, start: int, stop: int) -> None:
        """Protect whole pages; all of them or none.

        Raises
        ------
        OSError
            EPERM: nothing there can become writable; EBUSY: another userfaultfd has some of it.
        """
        words = struct.pack("=4Q", start, stop - start, _REGISTER_WP, 0)
        try:
            _control(self.userfaultfd, UFFDIO_REGISTER, words)
        except OSError as error:
            if error.errno == errno.ENOMEM:  # others come before the first mapping is changed
                self.unprotect(start, stop)
            raise
        try:
            for first, last in self._regions(start, stop, _CHECK_WPASYNC, _HUGE, _HUGE):
                words = struct.pack("=3Q", first, last - first, _WRITEPROTECT_WP)
                _control(self.userfaultfd, _UFFDIO_WRITEPROTECT, words)
            self.scan(start, stop, _WP_MATCHING | _CHECK_WPASYNC, 0, _WRITTEN, None)
        except BaseException:
            self.unprotect(start, stop)
            raise

    def unprotect(self, start: int, stop: int) -> bool:
        """Remove the protection; return False if a part of the range is no longer what was protected."""
        try:
            _control(self.userfaultfd, _UFFDIO_UNREGISTER, struct.pack("=2Q", start, stop - start))
        except OSError:
            return False
        return True

    def written(self, start: int, stop: int) -> list[Range]:
        """Return what was written in a protected range, in order."""
        try:
            return self._regions(start, stop, _CHECK_WPASYNC, _WRITTEN, _WRITTEN)
        except PermissionError:  # a part was replaced by other memory
            return self._regions(start, stop, 0, _WPALLOWED | _WRITTEN, _WRITTEN)

    def close(self) -> None:
        """Close the descriptors (idempotent)."""
        descriptors = self.userfaultfd, self.pagemap
        self.userfaultfd = self.pagemap = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                try:
                    os.close(descriptor)
                except OSError:
                    pass  # the user's code closed what it does not know

    def _regions(self, start: int, stop: int, flags: int, wanted: int, shown: int) -> list[Range]:
        """Return the stretches of pages that have all `wanted` bits, in order."""
        found: list[Range] = []
        vector = (ctypes.c_uint64 * (3 * _REGIONS))()
        while start < stop:
            count, start = self.scan(start, stop, flags, wanted, shown, vector)
            found += zip(vector[: 3 * count : 3], vector[1 : 3 * count : 3], strict=True)
        return found

    def scan(
        self, start: int, stop: int, flags: int, wanted: int, shown: int, vector: _Vector | None
    ) -> tuple[int, int]:
        """Return how many stretches were found, and where the scan ended."""
        where, length = (0, 0) if vector is None else (ctypes.addressof(vector), _REGIONS)
        words = (_SCAN.size, flags, start, stop, 0, where, length, 0, 0, wanted, 0, shown)
        count, answer = _control(self.pagemap, PAGEMAP_SCAN, _SCAN.pack(*words))
        return count, _SCAN.unpack(answer)[_WALK_END]


def _open_userfaultfd() -> int:
    if SYS_USERFAULTFD < 0:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    descriptor: int = call(
        ctypes.c_long(SYS_USERFAULTFD), ctypes.c_int(os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
    )
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def _control(descriptor: int, operation: int, words: bytes) -> tuple[int, bytes]:
    """Call ioctl(2); return its result and the changed words."""
    answer = bytearray(words)
    return fcntl.ioctl(descriptor, operation, answer, True), bytes(answer)
