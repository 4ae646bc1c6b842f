"""Pages: advice to the system about the memory of segments, and pages that are made ahead of use.

Some facts (madvise(2), Documentation/admin-guide/mm/transhuge.rst, tmpfs(5)):

* memory that is shared consists of huge pages only where the administrator offers them: for memory without a
  name in /sys/kernel/mm/transparent_hugepage/shmem_enabled, for files by the mount option ``huge=``.  Under
  ``advise`` a page is huge if it is first touched through a mapping with MADV_HUGEPAGE; ``fallocate`` and
  ``pwrite`` make small ones;
* the first read of a new mapping of 64 MB takes 13 ms with small pages and 0.2 ms with huge ones;
* MADV_POPULATE_WRITE (Linux 5.14) enters the pages of a mapping into the page table, making those that are
  missing; where there is no memory it fails, where touching them would be SIGBUS.
"""

from __future__ import annotations

import mmap
import os
from functools import lru_cache

HUGE_NBYTES = 4 << 20
"""Segments from this size on are to have huge pages: of a smaller one half might be wasted."""
STEP = 16 << 20
"""Bytes populated by one call, which keeps other threads of Python waiting for some milliseconds."""
_POPULATE_WRITE = 23
_SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def advise(memory: mmap.mmap, fd: int) -> None:
    """Keep a fresh mapping out of core files, and ask for huge pages where it is large."""
    # A crash of one rank must not write gigabytes of shared arrays into a core file.
    _try(memory, mmap.MADV_DONTDUMP)
    if huge_pages_offered(fd, len(memory)):
        _try(memory, mmap.MADV_HUGEPAGE)


def huge_pages_offered(fd: int, nbytes: int) -> bool:
    """Return whether a mapping of so many bytes of a file may have huge pages."""
    return nbytes >= HUGE_NBYTES and _mode_of(fd) not in ("never", "deny")


def reserve_huge(fd: int, size: int) -> bool:
    """Reserve a file's pages as huge ones, where they have to be asked for; return whether that was done.

    If not, nothing is wrong: whatever there is too little of shows when small ones are reserved.
    """
    if size < HUGE_NBYTES or _mode_of(fd) != "advise":
        return False
    os.ftruncate(fd, size)
    try:
        with mmap.mmap(fd, size) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            _populate(memory)
    except OSError:
        return False
    return True


def populate(memory: mmap.mmap) -> None:
    """Enter all pages of a mapping into the page table: a third of what touching one by one takes."""
    try:
        _populate(memory)
    except OSError:
        pass  # an older kernel: they are entered when touched


def _populate(memory: mmap.mmap) -> None:
    for start in range(0, len(memory), STEP):
        memory.madvise(_POPULATE_WRITE, start, min(STEP, len(memory) - start))


def _try(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:
        pass  # it is advice: nothing depends on it


def _mode_of(fd: int) -> str:
    try:
        return huge_mode(os.fstat(fd).st_dev)
    except OSError:
        return "never"  # fstat(2) may lack memory: small pages do as well


@lru_cache(maxsize=64)
def huge_mode(device: int) -> str:
    """Return how a device of files offers huge pages: never, advise, within_size, always, deny or force.

    A device that is not mounted is that of memory without a name.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                if before.split()[2] == wanted:
                    options = after.split()[-1].split(",")
                    return next((word[5:] for word in options if word.startswith("huge=")), "never")
        with open(_SHMEM, encoding="utf-8") as file:
            return file.read().partition("[")[2].partition("]")[0] or "never"
    except OSError:
        return "never"  # not Linux, or built without them
