"""Written pages: which pages of some mappings this process wrote between two moments.

It is the second witness of a checked cell: what the arrays did not see, numba's or a C library's write, is
seen by the processor.  A page cannot say which of its bytes were written, nor that it was read.
`write_protection` has how the system does it.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from nbparallel.distributed.races.recording.write_protection import Range, WriteProtection
from nbparallel.wire.units import size_text

UNSEEN = "pages that are written past numpy cannot be seen: "

_watches: weakref.WeakSet[PageWatch] = weakref.WeakSet()
"""Those that watch: a forked child must drop them."""


class PageWatch:
    """Pages of some mappings that this process writes while it is entered.

    Where the system cannot find them, nothing raises: `refused` says why.

    Parameters
    ----------
    ranges : iterable of (address, nbytes)
        Memory to watch; rounded to whole pages.  It may lie in several mappings, be read-only, or be unmapped
        while it is watched: what was written there before is then forgotten.

    Attributes
    ----------
    refused : str
        Why some or all of the memory is not watched, as a sentence; empty if all of it is.

    Notes
    -----
    Writes of all threads count, and those of no other process.  One watch at a time can have a page: a second
    one refuses it.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.refused = ""
        self._ranges = _whole_pages(ranges)
        self._watched: list[Range] = []
        self.protection: WriteProtection | None = None

    def __enter__(self) -> Self:
        """Write-protect the memory."""
        if self._ranges:
            _watches.add(self)
            try:
                self._begin()
            except BaseException:  # an interrupt
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def written(self) -> list[tuple[int, int]]:
        """Return (address, nbytes) of what was written since the watch began, in order, in whole pages.

        After the watch, in a forked child and where all is `refused`, the list is empty.
        """
        found: list[Range] = []
        if self.protection is not None:
            try:
                for start, stop in self._watched:
                    found += self.protection.written(start, stop)
            except OSError as error:  # the user's code closed our descriptors
                self.refused = UNSEEN + _why_not_watched(error)
                return []
        return [(start, stop - start) for start, stop in _merged(found)]

    def close(self) -> None:
        """Remove the protection, and close the descriptors (idempotent)."""
        protection = self.protection
        if protection is not None:
            while self._watched:
                start, stop = self._watched[-1]
                if not protection.unprotect(start, stop):
                    for begin, end, _rights in _mappings(start, stop):
                        protection.unprotect(begin, end)  # what took our memory's place never was ours
                self._watched.pop()
        self._forget()

    def _begin(self) -> None:
        try:
            protection = self.protection = WriteProtection()
        except OSError as error:
            self.refused = UNSEEN + _why_no_protection(error)
            return
        refused: dict[str, int] = {}
        for start, stop in self._ranges:
            for reason, nbytes in self._watch(protection, start, stop):
                refused[reason] = refused.get(reason, 0) + nbytes
        if not self._watched:
            self._forget()
        if refused:
            parts = (f"{reason} ({size_text(nbytes)})" for reason, nbytes in refused.items())
            self.refused = UNSEEN + "; ".join(parts)

    def _watch(self, protection: WriteProtection, start: int, stop: int) -> Iterator[tuple[str, int]]:
        """Protect a range, mapping by mapping if not in one call; return what is refused."""
        if self._protect(protection, start, stop) is None:
            return
        for begin, end, rights in _mappings(start, stop):
            error = self._protect(protection, begin, end)
            if error is not None and not (error.errno == errno.EPERM and "w" not in rights):
                yield _why_not_watched(error), end - begin

    def _protect(self, protection: WriteProtection, start: int, stop: int) -> OSError | None:
        self._watched.append((start, stop))  # before it is true: an interrupt must not leave it behind
        try:
            protection.protect(start, stop)
        except OSError as error:
            self._watched.pop()
            return error
        return None

    def _forget(self) -> None:
        _watches.discard(self)
        protection, self.protection, self._watched = self.protection, None, []
        if protection is not None:
            protection.close()

    def _leave_to_parent(self) -> None:
        """Forget the watch in a forked child: what the descriptors act on is the parent's memory."""
        self._forget()
        self.refused = UNSEEN + "this process was forked from the one that is watched"


def _leave_all_to_parent() -> None:
    for watch in list(_watches):
        watch._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _why_no_protection(error: OSError) -> str:
    """Say why nothing can be watched."""
    if error.filename:
        return f"{error.filename} cannot be opened ({error.strerror})"
    if error.errno == errno.EINVAL:  # UFFD_USER_MODE_ONLY is of Linux 5.11, WP_ASYNC of 6.7
        return _too_old()
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return f"this system refuses userfaultfd ({error.strerror}); a container's seccomp profile may"
    return f"userfaultfd failed ({error.strerror})"


def _why_not_watched(error: OSError) -> str:
    """Say why some memory cannot be watched."""
    if error.errno == errno.ENOTTY:  # PAGEMAP_SCAN is of 6.7
        return _too_old()
    if error.errno == errno.EBUSY:
        return "another userfaultfd of this process has this memory"
    if error.errno == errno.ENOMEM:
        return "no memory for page tables, or too many mappings (vm.max_map_count)"
    if error.errno == errno.EINVAL:
        return "this kind of memory cannot be write-protected by page"
    return error.strerror or str(error)


def _too_old() -> str:
    return f"it takes Linux 6.7 or newer, and this is {platform.system()} {platform.release()}"


def _mappings(start: int, stop: int) -> Iterator[tuple[int, int, str]]:
    """Return what is mapped in a range: first address, one past the last, rights (proc_pid_maps(5))."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
    except OSError:
        lines = [f"{start:x}-{stop:x} rw-s"]  # try it all the same
    for line in lines:
        addresses, rights = line.split(None, 2)[:2]
        first, _, last = addresses.partition("-")
        begin, end = max(start, int(first, 16)), min(stop, int(last, 16))
        if begin < end:
            yield begin, end, rights


def _whole_pages(ranges: Iterable[tuple[int, int]]) -> list[Range]:
    page = mmap.PAGESIZE
    return _merged(
        [(at // page * page, -(-(at + nbytes) // page) * page) for at, nbytes in ranges if nbytes > 0]
    )


def _merged(ranges: list[Range]) -> list[Range]:
    """Return ranges in order, those that overlap or touch as one.

    >>> _merged([(8, 12), (0, 4), (4, 6), (9, 10)])
    [(0, 6), (8, 12)]
    """
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
