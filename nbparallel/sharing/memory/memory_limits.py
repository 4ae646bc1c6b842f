"""Memory limits: how much may still be allocated, by the machine's and the container's limits.

Some facts about full memory (cgroups(7), Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst):

* ``fallocate`` beyond physical memory, or beyond a memory cgroup's limit, does not fail: it wakes the OOM
  killer, which ends some process (exit 137), perhaps the notebook's kernel.  So ask first;
* a cgroup's limit counts its descendants' use;
* a cgroup's use counts the page cache of files, which is reclaimed when needed (shared memory is not part
  of the *file* lists, although ``cached`` counts it).
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from nbparallel.errors import FileDescriptorLimitError, SharedMemoryFullError
from nbparallel.wire.system import (
    ReadText,
    available_memory,
    cgroups,
    key_values,
    mapping_limit,
    open_descriptors,
    process_limit,
    read_text,
)
from nbparallel.wire.units import size_text

MARGIN = 32 << 20
"""Bytes left to other programs: below this the machine is about to kill some process anyway."""
FRESH_SECONDS = 0.05
"""Reading the limits takes about 0.1 ms; small segments in a row rely on a reading this old."""
PLENTY = 1 << 30
"""An old reading is relied on only while it leaves this many bytes."""

DELETE_ARRAYS = "delete shared arrays (and names that view them) with `del`"
"""Remedy where memory is freed with an array's last name."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit of memory."""

    free: int
    """Bytes that may still be taken."""
    where: str
    """Whose limit, in words."""
    whole: int = 0
    """Bytes in all."""


def limits(read: ReadText = read_text) -> Iterator[MemoryLimit]:
    """Yield every limit that can be read here; none on systems without /proc."""
    machine = _machine(read)
    if machine is not None:
        yield machine
    for directory, version in cgroups("memory", read):
        limit = _cgroup(read, directory, version)
        if limit is not None:
            yield limit


def _machine(read: ReadText) -> MemoryLimit | None:
    memory = available_memory(read)
    if memory is None:
        return None
    available, swap, total = memory
    return MemoryLimit(available + swap, f"this machine ({size_text(total)} of memory)", total + swap)


def _cgroup(read: ReadText, directory: str, version: int) -> MemoryLimit | None:
    names = (
        ("memory.max", "memory.current", "")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    maximum, current, prefix = names
    try:
        allowed = read(f"{directory}/{maximum}").strip()
        if not allowed.isdigit() or int(allowed) >= 1 << 60:  # "max", or v1's way to say it
            return None
        used = int(read(f"{directory}/{current}"))
        fields = key_values(read(f"{directory}/memory.stat"))
    except (OSError, ValueError):
        return None
    cache = fields.get(prefix + "inactive_file", 0) + fields.get(prefix + "active_file", 0) // 2
    return MemoryLimit(
        int(allowed) - used + cache,
        f"this container (memory cgroup limit {size_text(int(allowed))})",
        int(allowed),
    )


class MemoryGuard:
    """Check of the memory limits before an allocation.

    Notes
    -----
    Threads and processes that ask at the same moment may all be allowed; the margin and the reservation
    that follows make too much rare, not impossible.
    """

    def __init__(self, read: ReadText = read_text) -> None:
        self._read = read
        self._until = 0.0
        self._left = 0

    def require(self, nbytes: int) -> None:
        """Return if `nbytes` more may be taken.

        Raises
        ------
        SharedMemoryFullError
            They do not fit; the message has the numbers.
        """
        if time.monotonic() < self._until and self._left - nbytes > PLENTY:
            self._left -= nbytes
            return
        tightest = min(limits(self._read), key=lambda limit: limit.free, default=None)
        if tightest is None:
            return
        if tightest.free - MARGIN < nbytes:
            raise full_error(nbytes, max(0, tightest.free - MARGIN), tightest.where)
        self._left = tightest.free - MARGIN - nbytes
        self._until = time.monotonic() + FRESH_SECONDS


def full_error(
    nbytes: int,
    free: int | None,
    where: str,
    remedy: str = "raise the limit (Docker: --memory)",
    first: str = DELETE_ARRAYS,
) -> SharedMemoryFullError:
    """Return the error that says what was needed, what is free, where, and what to do."""
    need, have = size_text(nbytes), "" if free is None else size_text(free)
    if need == have:  # within a twentieth of a MiB: a page too much must not read "8.0 MiB, 8.0 MiB free"
        need, have = f"{-(-nbytes // 1024)} KiB", f"{(free or 0) // 1024} KiB"
    return SharedMemoryFullError(
        f"a shared array needs {need}{have and f', {have} free'} on {where}: "
        f"{first}, work on parts, or {remedy}"
    )


# Limits of one process on descriptors and mappings, and the reserve of both that shared arrays leave.
#
# Descriptors (getrlimit(2), unix(7)):
#
# * a new descriptor gets the lowest free number, so that a high number shows that the table is nearly full;
# * what is received when the table is full is lost (``MSG_CTRUNC``): a frame of the session may be lost so.
#   So shared arrays stop a few numbers earlier, and the session, the user's files and pipes go on working;
# * a mapping keeps none (`map_file`): an own segment costs one descriptor, a fetched one costs one while
#   it is being mapped.
#
# Mappings: beyond ``vm.max_map_count`` mmap fails for all code of the process, so shared arrays stop earlier.

LEAST_SPARE = 8
"""Left to others in any case: a rank that is started needs six for a moment."""
MOST_SPARE = 64
"""And no more than this."""
SPARE_SHARE = 8
"""In between, 1/8 of the table."""


def spare() -> int:
    """Return how many descriptors shared arrays leave to everything else."""
    return max(LEAST_SPARE, min(MOST_SPARE, descriptor_limit() // SPARE_SHARE))


def check_descriptor(fd: int) -> None:
    """Return if a fresh descriptor, and a duplicate that mapping it may make, leave enough to others.

    Raises
    ------
    FileDescriptorLimitError
        The table is nearly full.
    """
    if fd + 1 >= descriptor_limit() - spare():
        raise descriptor_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = process_limit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft is None else soft


def descriptor_error(error: OSError) -> FileDescriptorLimitError:
    """Return the error that names the limit of open files and what to do."""
    return FileDescriptorLimitError(
        error.errno,
        f"too many open files: {_limit_that_bit(error)}. Every shared array of 256 KiB or more needs a "
        "descriptor where it was made, and one for a moment where it arrives: delete shared arrays, put "
        "several into one, raise that limit, or use `%sharing_strategy file_region`, where new arrays under "
        "8 MiB have one descriptor together",
    )


def _limit_that_bit(error: OSError) -> str:
    """Return which limit was reached, how much of it is in use, and how it is raised."""
    if error.errno != errno.EMFILE:
        return "the limit of this machine for all processes (fs.file-max) is reached"
    soft, hard = process_limit(resource.RLIMIT_NOFILE)
    used = open_descriptors()  # None also if there is not even one left to count them
    have = "has used up" if used is None else f"has {used} open of"
    room = "" if soft == hard else f", which its user may raise to {hard or 'any number'}"
    return (
        f"this process {have} its limit of {soft} (`ulimit -n`{room}), of which shared arrays leave "
        f"{spare()} to other code"
    )


OTHERS_SHARE = 8
"""An eighth is left to everything else: libraries take hundreds, a heap of gigabytes a thousand."""


@lru_cache(maxsize=1)
def most_mappings() -> int:
    """Return how many segments a process may map."""
    limit = mapping_limit()
    return 1 << 40 if limit is None else limit - limit // OTHERS_SHARE


def check_mappings(count: int, nbytes: int) -> None:
    """Return if a process with `count` mapped segments may map another one.

    Raises
    ------
    SharedMemoryFullError
        It may not.
    """
    if count >= most_mappings():
        raise full_error(
            nbytes,
            None,
            f"this process, which maps {count} segments already",
            "put small arrays into one large one, or raise vm.max_map_count (sysctl)",
        )
