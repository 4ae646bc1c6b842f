"""Limits of one process on descriptors and mappings, and the reserve of both that shared arrays leave.

Descriptors (getrlimit(2), unix(7)):

* a new descriptor gets the lowest free number, so that a high number shows that the table is nearly full;
* what is received when the table is full is lost (``MSG_CTRUNC``): a frame of the session may be lost so.
  So shared arrays stop a few numbers earlier, and the session, the user's files and pipes go on working;
* a mapping keeps none (`file_mapping`): an own segment costs one descriptor, a fetched one costs one while it
  is being mapped.

Mappings: beyond ``vm.max_map_count`` mmap fails for all code of the process, so shared arrays stop earlier.
"""

from __future__ import annotations

import errno
import os
import resource
from functools import lru_cache

from nbparallel.errors import FileDescriptorLimitError
from nbparallel.sharing.memory.memory_limits import full_error
from nbparallel.wire.system import mapping_limit, open_descriptors, process_limit

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
        "several into one, use `%sharing_strategy file_region`, or raise that limit",
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
