"""Strategy: the contract of a way to share memory between processes."""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nbparallel.sharing.memory.mapping import Access, Mapping
from nbparallel.wire import locked_names

Intend: TypeAlias = Callable[[str], None]
"""Called with the path of a name before it is made."""
PACKS_BELOW = 256 << 10
"""Bytes; a segment of its own costs descriptors, a mapping and 0.1 ms, whatever its size."""
REGION_NBYTES = 16 << 20
"""Bytes; 10,000 arrays of 100 numbers fit four regions, 70,000 in eight (`file_region`: one, four)."""


def no_session(path: str) -> None:
    """Announce no name: there is no session."""


@dataclass(slots=True, eq=False)
class SegmentSource:
    """What a process needs to map a segment, and to let others map it; owns its descriptor."""

    fd: int
    """Descriptor of the memory; -1 once closed."""
    nbytes: int
    """Size of the whole segment in bytes, as a rule a multiple of the page size."""
    strategy: str
    """Name of the strategy that made it."""
    path: str = ""
    """Its name in the file system, removed with it; empty if it has none, or it is the user's file."""
    _pid: int = field(default_factory=os.getpid)

    def close(self) -> None:
        """Close the descriptor, remove the name (idempotent).  Mappings stay.  A forked child: nothing."""
        if os.getpid() != self._pid:
            return
        if self.path:
            # First: an interrupt in between may leave the descriptor to the next call, never the name.
            process_names.remove(self.path)
            self.path = ""
        if self.fd >= 0:
            # Nothing is called in between, so no interrupt falls there, and no number is closed twice.
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self) -> None:
        # Arrays may outlive their store, and nothing else knows this descriptor then.
        self.close()


class Strategy(ABC):
    """How a segment of memory is made and mapped.

    Implementations hold no state but their options: one object serves the whole process.

    Notes
    -----
    What every strategy promises, and `nbparallel.testing.strategies.StrategyTests` checks:

    * space is reserved before a segment is used: full memory is `SharedMemoryFullError`, never a signal;
    * a segment that was made is full of zeros, or holds the content that was given;
    * a descriptor that was opened for reading gives no mapping for writing;
    * a name that outlives its process is announced before it exists;
    * what another process sends is checked before it is mapped.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name by which users choose it."""

    @property
    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why it does not work here, or None where it does."""

    @property
    @abstractmethod
    def needs_clean_up(self) -> bool:
        """Whether a segment outlives every process that uses it, until its name is removed."""

    @property
    def shares(self) -> bool:
        """Whether there is shared memory at all; False: arrays are copied to the ranks."""
        return True

    @property
    def reuses_memory(self) -> bool:
        """Whether freed segments are kept a while for the next array; a name would stay as long."""
        return not self.needs_clean_up

    @property
    def packs_below(self) -> int:
        """Arrays of fewer bytes are packed into regions; 0: every array has a segment of its own."""
        return PACKS_BELOW

    @property
    def region_nbytes(self) -> int:
        """Size of the largest region, at least `packs_below`; the first ones are smaller."""
        return REGION_NBYTES

    @property
    def options(self) -> dict[str, Any]:
        """Options that `configure` has set; ranks get them."""
        return {}

    def configure(self, **options: Any) -> None:
        """Take the keyword arguments of ``set_sharing_strategy(name, …)``.

        Raises
        ------
        TypeError
            It knows no such option.
        ValueError, StrategyUnavailableError
            The value makes no sense, or does not work here.  Nothing has changed.
        """
        if options:
            raise TypeError(f"sharing strategy {self.name!r} has no option {', '.join(sorted(options))}")

    @abstractmethod
    def create(
        self, nbytes: int, content: memoryview | None = None, intend: Intend = no_session
    ) -> SegmentSource:
        """Make a segment of at least `nbytes` bytes.

        Parameters
        ----------
        nbytes : int
            At least 1; rounded up to whole pages.
        content : contiguous memoryview of bytes, at most `nbytes` long, optional
            What the segment starts with; the rest is zeros.
        intend : callable
            To be called with the absolute path of a name in the file system *before* it is made, if the
            segment gets one (`needs_clean_up`); the file's name begins with ``nbp_``.

        Raises
        ------
        SharedMemoryFullError
            Not enough memory.
        FileDescriptorLimitError
            Too many open files.
        """

    @abstractmethod
    def adopt(self, fd: int, nbytes: int) -> SegmentSource:
        """Take over a descriptor that came from another process, after checking it.

        Raises
        ------
        InvalidHandleError
            It is not what a segment of this strategy and size looks like; `fd` is closed.
        """

    @abstractmethod
    def map(self, source: SegmentSource, access: Access) -> Mapping:
        """Map the whole segment into this process."""


# Names of segments that this process has made and not removed yet.
#
# With a session the supervisor removes what a process leaves behind, however it dies.  Without one, only the
# process itself is there: the names it still has are removed when it exits.  After a ``kill -9`` without a
# session, or of notebook and supervisor together, the names stay; the next session's sweep finds them, and
# that no process has them locked (`wire.locked_names`) proves that none needs them.


class OwnedNames:
    """Paths that one process has to remove.

    Notes
    -----
    Thread-safe without a lock: finalizers remove names, and they may run within any other method.
    """

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._stem = ""
        self._serials = itertools.count(1)
        self.notebook = 0
        """The process in whose session a rank makes names; to be set before the first."""

    def draw(self) -> str:
        """Return an unused file name of at most 25 characters, which macOS allows.

        >>> len(process_names.draw()) <= 25, process_names.draw() == process_names.draw()
        (True, False)
        """
        if not self._stem:
            self._stem = locked_names.stem(self.notebook or os.getpid(), secrets.randbits(25))
        number, letters = next(self._serials), ""
        while number:
            number, digit = divmod(number, 32)
            letters = locked_names.LETTERS[digit] + letters
        return f"{self._stem}_{letters}"

    def change_stem(self) -> None:
        """Have later names begin otherwise."""
        self._stem = ""

    def claim(self, path: str) -> None:
        """Record a name that is about to be made: it is removed at exit."""
        self._paths.add(path)

    def disclaim(self, path: str) -> None:
        """Leave a name alone from now on: it belongs to another program, or was never made (idempotent)."""
        self._paths.discard(path)

    def remove(self, path: str) -> None:
        """Remove a name and its claim (idempotent); the name need not exist."""
        try:
            os.unlink(path)
        except OSError:
            pass  # the supervisor or another program was quicker, or the directory was removed with it
        self.disclaim(path)

    def remove_all(self) -> None:
        """Remove every name of this process: it exits."""
        for path in [*self._paths]:
            self.remove(path)

    def disclaim_all(self) -> None:
        """Leave all names to the parent of a forked child, and draw none that could equal one of them."""
        self._paths.clear()
        self._stem, self.notebook = "", 0


process_names = OwnedNames()
"""The names of this process."""
atexit.register(process_names.remove_all)
os.register_at_fork(after_in_child=process_names.disclaim_all)
