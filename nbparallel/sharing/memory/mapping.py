"""Mapping: a segment's memory in this process, and whether arrays still use it.

Note [leases]
-------------
All arrays of a mapping are views of one *root*, a plain uint8 array over the whole mapping.  numpy
collapses chains of bases, but never beyond an array whose own base is no array: so the root lives exactly
as long as the last view of it, whatever views of views the user made.  A weak reference shows when it died.
Where many arrays share a mapping, each has such a root over its own part (`region`).
The mapping itself may stay: a later lease makes a new root on the same, already touched pages.

The weak reference's callback is a deque's own ``append``: it runs no Python code, takes no lock, cannot
raise, and is safe from any thread, from within the garbage collector and in a forked child.  What has to be
done about a dead root is done later, by `Store.drain`.
"""

from __future__ import annotations

import enum
import mmap
import weakref
from collections import deque
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from nbparallel.errors import InternalError
from nbparallel.sharing.memory import pages
from nbparallel.sharing.memory.file_mapping import address_of

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

    __slots__ = ("_lease", "_memory", "_populated", "access", "address", "nbytes")
    access: Access
    address: int
    nbytes: int

    def __init__(self, memory: mmap.mmap, access: Access, address: int | None = None) -> None:
        self._memory: mmap.mmap | None = memory
        self._lease: Lease | None = None
        self._populated = False
        self.access = access
        self.nbytes = len(memory)
        self.address = address_of(memory) if address is None else address

    @property
    def end(self) -> int:
        """One past the last byte's address."""
        return self.address + self.nbytes

    def root(self, dead: deque[Lease]) -> Root:
        """Return the living root, or begin a new lease whose end is appended to `dead`."""
        root = self.living_root()
        if root is None:
            if self._memory is None:
                raise InternalError("a segment was used after it had been unmapped: please file a bug")
            root = np.frombuffer(self._memory, np.uint8)
            lease = Lease(root, dead.append)
            lease.mapping = self
            self._lease = lease
        return root

    def part(self, start: int, nbytes: int, dead: deque[Lease]) -> tuple[Root, Lease]:
        """Return a root of its own for some of the bytes, whose end is appended to `dead`."""
        if self._memory is None:
            raise InternalError("a segment was used after it had been unmapped: please file a bug")
        root = np.frombuffer(self._memory, np.uint8, nbytes, start)
        lease = Lease(root, dead.append)
        lease.mapping, lease.start = self, start
        return root, lease

    def living_root(self) -> Root | None:
        """Return the root if any array still uses this memory (not a part of it)."""
        return None if self._lease is None else self._lease()

    def advise(self, fd: int) -> None:
        """Advise the system about a fresh mapping of the memory of `fd`."""
        if self._memory is not None:
            pages.advise(self._memory, fd)

    def populate(self) -> None:
        """Enter all pages into the page table, once: before every one of them is written to."""
        if self._memory is not None and not self._populated:
            self._populated = True
            pages.populate(self._memory)

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
