"""File mapping: the memory of a file as a `mmap` object that keeps no descriptor.

Some facts (mmap(2), CPython's Modules/mmapmodule.c):

* a mapping needs no descriptor: the system keeps the file for it;
* until Python 3.12 a `mmap` object of a file keeps a duplicate of the descriptor all the same, for `resize`.
  From 3.13 on ``trackfd=False`` does without;
* MAP_FIXED replaces what is mapped in a range of addresses, in one step for all threads.  So an object of
  memory without a file, of the same size and rights, becomes the owner of a file's memory: its buffer,
  `madvise`, and the one ``munmap`` with its last reference act on addresses only;
* a failing MAP_FIXED leaves the old pages or none there.  Either way the object is closed immediately;
* what is mapped MAP_NORESERVE and never touched takes no memory, and is not counted as reserved unless the
  machine insists (``vm.overcommit_memory=2``);
* the system gives a file with huge pages an address at which they fit, which the object does not have.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

from nbparallel.sharing.memory import pages

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
"""Both not in every `mmap`; the values of Linux."""
_PLACE = _MAP_NORESERVE | (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
_UINT8 = np.dtype(np.uint8)


def address_of(memory: mmap.mmap) -> int:
    """Return where memory is mapped."""
    address: int = np.frombuffer(memory, _UINT8).__array_interface__["data"][0]
    return address


def map_file(fd: int, nbytes: int, flags: int, prot: int) -> tuple[mmap.mmap, int]:
    """Map a file from its first byte on, as `mmap.mmap`, without a descriptor where that can be had.

    Returns the memory and its address.

    Until Python 3.12 a descriptor is kept of a file with huge pages, outside Linux, and where memory without
    a file is refused; also, a file shorter than `nbytes` is not noticed.
    """
    if sys.version_info >= (3, 13):
        memory = mmap.mmap(fd, nbytes, flags, prot, trackfd=False)
        return memory, address_of(memory)
    if sys.platform == "linux" and not pages.huge_pages_offered(fd, nbytes):
        placed = place_file(fd, nbytes, flags, prot)
        if placed is not None:
            return placed
    memory = mmap.mmap(fd, nbytes, flags, prot)  # its error says what is wrong
    return memory, address_of(memory)


def place_file(fd: int, nbytes: int, flags: int, prot: int) -> tuple[mmap.mmap, int] | None:
    """Map a file in the place of memory without one; return None if the system refuses."""
    try:
        memory = mmap.mmap(-1, nbytes, _PLACE, prot)
    except OSError:
        return None  # a limit of private memory, which the file's is not
    address = address_of(memory)
    if _map(address, nbytes, prot, flags | _MAP_FIXED, fd, 0) == address:
        return memory, address
    memory.close()
    return None


# The interpreter's lock is kept: the call is short.
_map = ctypes.PyDLL(None).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
