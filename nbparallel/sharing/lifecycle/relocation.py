"""Rehoming: other memory under the arrays of this process, without their noticing.

A segment's memory is copied into one of another strategy, and that one is mapped over the same addresses.  So
every array, view, memoryview and tensor of this process stays valid and sees the new memory; nothing has to
be found or bound anew.  Other processes are the caller's business: none may look at the old memory.

Some facts (mmap(2), "MAP_FIXED"; dup(2)):

* ``MAP_FIXED`` replaces what was mapped at an address in one step: another thread that reads meanwhile sees
  the old page or the new one, never none.  What it *writes* between the copy and that step is lost;
* Python's `mmap` unmaps its range of addresses when it dies, whatever is mapped there then;
* until Python 3.12 it keeps a duplicate of the descriptor, which would keep the old memory as long: it is
  made a duplicate of the new one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from nbparallel.errors import FileDescriptorLimitError, SegmentInUseError, SharedMemoryFullError
from nbparallel.sharing.lifecycle.allocator import make_room
from nbparallel.sharing.lifecycle.segment import Block, Segment
from nbparallel.sharing.lifecycle.segment_table import SegmentTable
from nbparallel.sharing.memory.mapping import Access
from nbparallel.sharing.memory.process_limits import check_descriptor
from nbparallel.sharing.strategies.page_allocation import explained
from nbparallel.sharing.strategies.strategy import SegmentSource, Strategy

_MAP_FIXED = 0x10
"""The same number on Linux and macOS; Python's `mmap` does not name it."""
_FAILED = ctypes.c_void_p(-1).value


def movable(table: SegmentTable, x: object) -> Segment:
    """Return the segment of `x` if it can be rehomed.

    Raises
    ------
    ValueError
        `x` is no array in shared memory.
    SegmentInUseError
        Other arrays are packed into the segment, or it belongs to another process.
    """
    place = table.find(x)
    if place is None:
        raise ValueError("only an array in shared memory can be migrated; see nbp.share(x, strategy=…)")
    segment = place.segment
    instead = "share a copy of it instead: x = nbp.share(x.copy(), strategy=…)"
    if segment.block is None:
        raise SegmentInUseError(f"another process made this array, and alone may move it; {instead}")
    if segment.region is not None:
        raise SegmentInUseError(f"this array is packed with other small ones, which would move; {instead}")
    if segment.private:
        raise SegmentInUseError(f"something here looks at a private copy of this array's memory; {instead}")
    return segment


def rehome(table: SegmentTable, x: object, strategy: Strategy) -> None:
    """Give the segment of `x` memory of another strategy.

    It has a new id, which no session knows yet; the old one means nothing any more, anywhere.

    Raises
    ------
    ValueError, SegmentInUseError
        As `movable`.
    SharedMemoryFullError, FileDescriptorLimitError
        There is no room for the copy.  Nothing has changed.
    """
    segment = movable(table, x)
    old = segment.block
    root = None if old is None else old.mapping.living_root()
    if old is None or root is None:
        raise ValueError("no array looks at this memory any more")
    intended: list[str] = []

    def intend(path: str) -> None:
        intended.append(path)
        table.sessions.intend(path)

    source = None
    try:
        try:
            source = strategy.create(old.nbytes, root.data, intend)
        except (SharedMemoryFullError, FileDescriptorLimitError):
            # What lies in the pool may be all that is missing.
            if not make_room(table):
                raise
            source = strategy.create(old.nbytes, root.data, intend)
        check_descriptor(source.fd)
        new = Block(source, old.mapping)
        # A user's file is mapped to its last byte, what the pool gives out to its last page.
        poolable = strategy.reuses_memory and source.nbytes == old.mapping.nbytes
        try:
            _replace(table, segment, new, poolable=poolable)
        except KeyboardInterrupt:
            # It fell in between: each step may be done twice, none may be missing.
            _replace(table, segment, new, poolable=poolable)
            raise
        finally:
            if segment.block is new:
                _give_up(table, old, new)
    except BaseException:
        if source is None or segment.block is old:
            if source is not None:
                source.close()
            for path in intended:
                table.sessions.removed(path)
        raise


def _replace(table: SegmentTable, segment: Segment, block: Block, *, poolable: bool) -> None:
    _map_over(block)
    table.renew(segment, block, poolable=poolable)


def _map_over(block: Block) -> None:
    """Let the addresses of a block's mapping show the memory of its source."""
    mapping = block.mapping
    rights = mmap.PROT_READ if mapping.access is Access.READ else mmap.PROT_READ | mmap.PROT_WRITE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(mapping.address, mapping.nbytes, rights, flags, block.source.fd, 0) == _FAILED:
        number = ctypes.get_errno()
        raise explained(OSError(number, os.strerror(number)), mapping.nbytes)
    mapping.advise(block.source.fd)


def _give_up(table: SegmentTable, old: Block, new: Block) -> None:
    """Give the old memory back to the system, and remove its name; a user's file stays."""
    source = old.source
    if source.fd >= 0 and (source.path or os.fstat(source.fd).st_nlink == 0):
        _redirect(source, new.source)
    path = source.path
    source.close()
    if path:
        table.sessions.removed(path)


def _redirect(old: SegmentSource, new: SegmentSource) -> None:
    """Make the descriptor of the old memory that Python's `mmap` keeps to itself one of the new."""
    if sys.version_info >= (3, 13):
        return
    status = os.fstat(old.fd)
    for name in os.listdir("/dev/fd"):
        fd = int(name)
        try:
            same = fd != old.fd and os.path.samestat(os.fstat(fd), status)
        except OSError:
            continue  # the listing's own, or one that another thread has just closed
        if same:
            os.dup2(new.fd, fd, inheritable=False)
