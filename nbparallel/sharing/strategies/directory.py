"""Segment directory: where files are segments, and what to do when it is full."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nbparallel.errors import SharedMemoryFullError
from nbparallel.sharing.memory.memory_limits import DELETE_ARRAYS, full_error
from nbparallel.wire.locked_names import file_system_of
from nbparallel.wire.units import size_text


@dataclass(frozen=True, slots=True)
class SegmentDirectory:
    """A directory whose files are segments, as errors name it."""

    path: str
    """Absolute path."""
    remedy: str
    """What to do when it is full."""
    first: str = DELETE_ARRAYS
    """What to do first."""

    def require(self, nbytes: int) -> None:
        """Return if a file of `nbytes` bytes seems to fit; whether it does, only `posix_fallocate` knows.

        Raises
        ------
        SharedMemoryFullError
            It does not; the message has the numbers.
        """
        try:
            extent = os.statvfs(self.path)
        except OSError:
            return
        if extent.f_files and not extent.f_favail:
            raise SharedMemoryFullError(
                f"no file can be added to {self}: all {extent.f_files} names that it can hold are taken; "
                f"{self.first}, or {self.remedy}"
            )
        free = extent.f_bavail * extent.f_frsize
        if free < nbytes:
            # Raised as it is made: an error that a variable of its own traceback holds is a cycle, which
            # would keep the caller's arrays alive until the garbage collector runs.
            raise full_error(nbytes, free, str(self), self.remedy, self.first)

    def full_error(self, nbytes: int) -> SharedMemoryFullError:
        """Return the error for a file that the system has just refused because the directory is full."""
        try:
            self.require(nbytes)
        except SharedMemoryFullError as error:
            return error
        # What is free by now need not be what was missing: other files come and go.
        where = f"{self}, which a moment ago was too full"
        return full_error(nbytes, None, where, self.remedy, self.first)

    def __str__(self) -> str:
        try:
            extent = os.statvfs(self.path)
        except OSError:
            return self.path
        kind = file_system_of(self.path) or "file system"
        return f"{self.path} ({kind} of {size_text(extent.f_blocks * extent.f_frsize)})"
