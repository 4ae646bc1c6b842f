"""A stand-in for the store: memfds whose descriptors forked children inherit."""

import mmap
import os
from dataclasses import dataclass

import numpy as np

from nbparallel.wire.name_updates import ArrayHandle


@dataclass
class Place:
    """As `nbparallel.sharing.lifecycle.segment.Location`."""

    segment: int
    start: int
    for_all: bool


class StandinStore:
    """Just enough of `nbparallel.sharing.Store`."""

    rights_changes = 0

    def __init__(self):
        self.roots = {}
        self.fds = {}
        self.open = set()

    def empty(self, shape, dtype=float, order="C"):
        """Return a new shared array."""
        dtype = np.dtype(dtype)
        nbytes = max(int(np.prod(shape)) * dtype.itemsize, 1)
        fd = os.memfd_create("nbp-standin", os.MFD_CLOEXEC)
        os.truncate(fd, nbytes)
        segment = len(self.roots) + 1
        self.fds[segment] = fd
        self.roots[segment] = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        return np.ndarray(shape, dtype, self.roots[segment], order=order)

    def join(self, parts):
        """Return a new shared array of bytes."""
        whole = self.empty((sum(part.nbytes for part in parts),), np.uint8)
        whole[:] = np.frombuffer(b"".join(parts), np.uint8)
        return whole

    def location(self, x):
        """Return where `x` lies."""
        for segment, root in self.roots.items():
            offset = x.ctypes.data - root.ctypes.data
            if 0 <= offset < root.nbytes:
                return Place(segment, offset, segment in self.open)
        return None

    def handle(self, x, *, broker=None, writable=False):
        """Return the handle of `x`."""
        place = self.location(x)
        if place is None:
            return None
        if writable is None:
            writable = place.for_all and x.flags.writeable
        nbytes = self.roots[place.segment].nbytes
        return ArrayHandle(place.segment, nbytes, place.start, x.shape, x.strides, x.dtype.str, writable)

    def attach(self, handle, *, writable=False, private=False, broker=None):
        """Return the array of a handle."""
        root = self.roots[handle.segment]
        if private:
            root = np.frombuffer(
                mmap.mmap(self.fds[handle.segment], root.nbytes, flags=mmap.MAP_PRIVATE), np.uint8
            )
        x = np.ndarray(handle.shape, np.dtype(handle.dtype), root, handle.offset, handle.strides)
        x.flags.writeable = writable or private
        return x

    def close(self):
        """Let go of all memory."""
        self.roots.clear()
        while self.fds:
            os.close(self.fds.popitem()[1])
