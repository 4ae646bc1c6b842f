"""Mappings: how many of them shared arrays may have in one process.

Some facts (mmap(2), Documentation/admin-guide/sysctl/vm.rst):

* a process may have vm.max_map_count mappings, 65,530 as a rule; beyond that ``mmap`` fails with ENOMEM for
  everybody: Python's own allocator and new threads included, wherever they happen to be;
* so shared arrays stop before.  Small ones share segments: this concerns tens of thousands of large ones.
"""

from __future__ import annotations

from functools import lru_cache

from nbparallel.sharing.memory.memory_limits import full_error

OTHERS_SHARE = 8
"""An eighth is left to everything else: libraries take hundreds, a heap of gigabytes a thousand."""


@lru_cache(maxsize=1)
def most_mappings() -> int:
    """Return how many segments a process may map."""
    try:
        with open("/proc/sys/vm/max_map_count", encoding="utf-8") as file:
            limit = int(file.read())
    except (OSError, ValueError):
        return 1 << 40  # not Linux
    return limit - limit // OTHERS_SHARE


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
