"""Mapping: a segment's memory in this process, and whether arrays still use it.

Note [leases]
-------------
All arrays of a mapping are views of one *root*, a plain uint8 array over the whole mapping.  numpy
collapses chains of bases, but never beyond an array whose own base is no array: so the root lives exactly
as long as the last view of it, whatever views of views the user made.  A weak reference shows when it died.
Where many arrays share a mapping, each has such a root over its own part (`segment.Region`).
The mapping itself may stay: a later lease makes a new root on the same, already touched pages.

The weak reference's callback is a deque's own ``append``: it runs no Python code, takes no lock, cannot
raise, and is safe from any thread, from within the garbage collector and in a forked child.  What has to be
done about a dead root is done later, by `Store.drain`.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import sys
import weakref
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

# Pages: advice to the system about the memory of segments, and pages that are made ahead of use.
#
# Some facts (madvise(2), Documentation/admin-guide/mm/transhuge.rst, tmpfs(5)):
#
# * memory that is shared consists of huge pages only where the administrator offers them: for memory without
#   a name in /sys/kernel/mm/transparent_hugepage/shmem_enabled, for files by the mount option ``huge=``.
#   Under ``advise`` a page is huge if it is first touched through a mapping with MADV_HUGEPAGE;
#   ``fallocate`` and ``pwrite`` make small ones;
# * the first read of a new mapping of 64 MB takes 13 ms with small pages and 0.2 ms with huge ones;
# * MADV_POPULATE_WRITE (Linux 5.14) enters the pages of a mapping into the page table, making those that are
#   missing; where there is no memory it fails, where touching them would be SIGBUS.

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


# File mapping: the memory of a file as a `mmap` object that keeps no descriptor.
#
# Some facts (mmap(2), CPython's Modules/mmapmodule.c):
#
# * a mapping needs no descriptor: the system keeps the file for it;
# * until Python 3.12 a `mmap` object of a file keeps a duplicate of the descriptor all the same, for
#   `resize`. From 3.13 on ``trackfd=False`` does without;
# * MAP_FIXED replaces what is mapped in a range of addresses, in one step for all threads.  So an object of
#   memory without a file, of the same size and rights, becomes the owner of a file's memory: its buffer,
#   `madvise`, and the one ``munmap`` with its last reference act on addresses only;
# * a failing MAP_FIXED leaves the old pages or none there.  Either way the object is closed immediately;
# * what is mapped MAP_NORESERVE and never touched takes no memory, and is not counted as reserved unless the
#   machine insists (``vm.overcommit_memory=2``);
# * the system gives a file with huge pages an address at which they fit, which the object does not have.

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
"""Both not in every `mmap`; the values of Linux."""
_PLACE = _MAP_NORESERVE | (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
_UINT8 = np.dtype(np.uint8)


_DELETED = " (deleted)"
"""Behind the name of a file that has none any more (proc_pid_maps(5))."""


class MappedPlace(NamedTuple):
    """Where an address lies in a file."""

    path: str
    """The file's name now, however it has been renamed."""
    offset: int
    inode: int
    shared: bool
    """Whether what is written there is in the file; else it is this process's own."""
    writable: bool

    @property
    def deleted(self) -> bool:
        """Whether the file has no name any more."""
        return self.path.endswith(_DELETED) and not os.path.exists(self.path)


def mapped_place(address: int) -> MappedPlace | None:
    """Return what is mapped at an address; None if it is no file, or the system does not say."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                start, _, stop = line[: line.index(" ")].partition("-")
                if int(start, 16) <= address < int(stop, 16):
                    break
            else:
                return None
    except OSError:
        return None
    _, rights, begin, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
    if not path:
        return None
    offset, name = address - int(start, 16) + int(begin, 16), path[0].replace("\\012", "\n")
    return MappedPlace(name, offset, int(inode), rights[3] == "s", rights[1] == "w")


VIEWS = frozenset({np.ndarray, np.memmap, np.recarray, np.matrix})
"""Classes of arrays that are nothing but a view of their memory."""


class Files(enum.Enum):
    """How a receiver maps the file of a `numpy.memmap`."""

    SHARED = "r+"
    """A task: what it writes is in the file."""
    PRIVATE = "c"
    """Copy-on-write."""


class FileView(NamedTuple):
    """A `numpy.memmap`, or a view of one, as another process of this machine maps it, too."""

    kind: type
    path: str
    identity: tuple[int, int]
    """Device and inode: another file may have got the name."""
    mode: str
    offset: int
    """Of the first byte in the file, whichever element has it."""
    nbytes: int
    first: int
    """Of the first element, from there."""
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def open(self) -> Any:
        """Return the array over the file itself."""
        mapped: Any = np.memmap  # the stubs know no variable mode
        whole = mapped(self.path, np.uint8, self.mode, self.offset, (self.nbytes,))
        found = os.stat(self.path)
        if (found.st_dev, found.st_ino) != self.identity:
            raise FileNotFoundError(f"{self.path} is another file now than the one that was mapped")
        array: Any = np.ndarray.__new__(self.kind, self.shape, self.dtype, whole, self.first, self.strides)
        for name in ("_mmap", "filename", "offset", "mode") if self.kind is np.memmap else ():
            setattr(array, name, getattr(whole, name))
        return array


def view_of_file(array: np.ndarray[Any, Any], files: Files) -> FileView | None:
    """Return how another process maps what a `numpy.memmap` has mapped; None: copy it.

    Raises
    ------
    FileNotFoundError
        Its file has no name any more, and what a task writes would be lost.
    """
    base: Any = array
    while not isinstance(base, np.memmap):
        base = base.base
        if not isinstance(base, np.ndarray):
            return None
    if array.dtype.hasobject or not array.size:
        return None
    address = array.__array_interface__["data"][0]
    ways = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    low, high = (address + sum(way for way in ways if way * sign > 0) for sign in (-1, 1))
    place = mapped_place(low)
    if place is None or not place.shared:
        return None  # a copy in memory, or one that is written to without the file (mode "c")
    writes = place.writable and array.flags.writeable
    if place.deleted:
        if not writes or files is Files.PRIVATE:
            return None
        raise FileNotFoundError(
            f"the file of this numpy.memmap, {place.path.removesuffix(_DELETED)}, has been deleted: no "
            "other process can map it; np.array(…) of it makes a copy that travels"
        )
    found = os.stat(place.path)
    return FileView(
        type(array), place.path, (found.st_dev, found.st_ino), files.value if writes else "r", place.offset,
        high - low + array.itemsize, address - low, array.dtype, array.shape, array.strides,
    )  # fmt: skip


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
    if sys.platform == "linux" and not huge_pages_offered(fd, nbytes):
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


Root: TypeAlias = npt.NDArray[np.uint8]
Content: TypeAlias = memoryview | tuple[memoryview, ...]
"""What memory starts with: contiguous bytes, or several one behind the other."""


def parts_of(content: Content) -> tuple[memoryview, ...]:
    """Return the parts of a content, in order."""
    return (content,) if isinstance(content, memoryview) else content


def write_content(root: Root, content: Content) -> None:
    """Write a content to where `root` begins."""
    end = 0
    for part in parts_of(content):
        begin, end = end, end + part.nbytes
        root[begin:end] = np.frombuffer(part, np.uint8)


class Access(enum.Enum):
    """What a mapping may be used for."""

    READ = "read"
    """Reading only; neither a flag nor `base` makes an array of it writable."""
    WRITE = "write"
    """Reading and writing, seen by every process."""
    PRIVATE = "private"
    """Copy-on-write: what is written stays in this process."""

    if not TYPE_CHECKING:  # for a checker it is `Enum`'s
        __hash__ = object.__hash__  # `Enum`'s is written in Python, and every attach looks up a few


class Lease(weakref.ref[Root]):
    """A weak reference to a root, with its mapping; its end is appended to a deque."""

    mapping: Mapping | None = None
    """None if an interrupt fell into the making of it."""
    start: int = -1
    """Offset of the part that it is the root of; -1: the whole mapping."""


class Mapping:
    """The memory of one segment in this process, with one kind of access.

    Parameters
    ----------
    memory : mmap
        All of the segment, mapped with rights that fit `access`.
    access : Access
        What it may be used for.
    address : int, optional
        Where it is mapped, if that is known.
    """

    access: Access
    address: int
    nbytes: int

    __slots__ = ("_lease", "_memory", "_populated", "access", "address", "nbytes")

    def __init__(self, memory: mmap.mmap, access: Access, address: int | None = None) -> None:
        self._memory: mmap.mmap | None = memory
        self._lease: Lease | None = None
        self._populated = False
        self.access = access
        self.nbytes = len(memory)
        self.address = address_of(memory) if address is None else address

    def root(self, dead: deque[Lease]) -> Root:
        """Return the living root, or begin a new lease whose end is appended to `dead`."""
        root = self.living_root()
        if root is None:
            assert self._memory is not None, "it was unmapped"
            root = np.frombuffer(self._memory, np.uint8)
            lease = Lease(root, dead.append)
            lease.mapping = self
            self._lease = lease
        return root

    def part(self, start: int, nbytes: int, dead: deque[Lease]) -> tuple[Root, Lease]:
        """Return a root of its own for some of the bytes, whose end is appended to `dead`."""
        assert self._memory is not None, "it was unmapped"
        root = np.frombuffer(self._memory, np.uint8, nbytes, start)
        lease = Lease(root, dead.append)
        lease.mapping, lease.start = self, start
        return root, lease

    def living_root(self) -> Root | None:
        """Return the root if any array still uses this memory (not a part of it)."""
        return None if self._lease is None else self._lease()

    def populate(self) -> None:
        """Enter all pages into the page table, once: before every one of them is written to."""
        if self._memory is not None and not self._populated:
            self._populated = True
            populate(self._memory)

    def unmap(self) -> None:
        """Unmap the address range (idempotent).

        Only a reference is dropped: should an array still use it, the memory stays mapped until it does not.
        """
        self._lease = None
        self._memory = None


T = TypeVar("T")


class RetryQueue(deque[T]):
    """A queue whose items stay until they are finished, wherever an interrupt or a ``__del__`` falls.

    ``append`` is the deque's own: see `mapping`, note [leases].
    """

    def first(self) -> T | None:
        """Return the next item, None if there is none."""
        try:
            return self[0] if self else None
        except IndexError:
            return None

    def finish(self, item: T) -> None:
        """Remove the first item, unless a call that came in between has done so."""
        try:
            if self[0] is item:
                self.popleft()
        except IndexError:
            pass
