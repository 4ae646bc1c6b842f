"""Strategy: the contract of a way to share memory between processes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from nbparallel.sharing.mapping import Access, Mapping


@dataclass(slots=True, eq=False)
class SegmentSource:
    """What a process needs to map a segment, and to let others map it; owns its descriptor."""

    fd: int
    """Descriptor of the memory; -1 once closed."""
    nbytes: int
    """Size of the whole segment in bytes, a multiple of the page size."""
    strategy: str
    """Name of the strategy that made it."""
    _pid: int = field(default_factory=os.getpid)

    def close(self) -> None:
        """Close the descriptor; again is fine.  Mappings stay.  In a forked child: nothing."""
        if self.fd >= 0 and os.getpid() == self._pid:
            # Nothing is called in between, so no interrupt falls there; and never is a number closed twice.
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self) -> None:
        # Arrays may outlive their store, and nobody else knows this descriptor then.
        self.close()


class Strategy(ABC):
    """How a segment of memory is made and mapped.

    Implementations hold no state of their own: one object serves the whole process.

    Notes
    -----
    What every strategy promises, and `nbparallel.testing` will check:

    * space is reserved before a segment is used: full memory is `SharedMemoryFullError`, never a signal;
    * a segment that was made is full of zeros, or holds the content that was given;
    * nobody who merely maps a segment can change its size.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """How users choose it."""

    @property
    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why it does not work here, or None where it does."""

    @property
    @abstractmethod
    def supports_read_only(self) -> bool:
        """Whether a mapping for reading stays one, whatever its holder tries."""

    @property
    @abstractmethod
    def needs_clean_up(self) -> bool:
        """Whether a segment outlives every process that uses it until somebody removes its name."""

    @property
    @abstractmethod
    def needs_descriptor(self) -> bool:
        """Whether every live segment costs a file descriptor."""

    @abstractmethod
    def create(self, nbytes: int, content: memoryview | None = None) -> SegmentSource:
        """Make a segment of at least `nbytes` bytes.

        Parameters
        ----------
        nbytes : int
            At least 1; rounded up to whole pages.
        content : contiguous memoryview of bytes, at most `nbytes` long, optional
            What the segment starts with; the rest is zeros.

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
