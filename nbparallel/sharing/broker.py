"""Segment broker: the protocol by which a store registers, fetches and releases segments of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nbparallel.wire.segments import Notice


class SegmentBroker(Protocol):
    """One session's exchange of segments, as seen from one process.

    Sharing does not know how the other processes are reached: `nbparallel.channel.SegmentClient` speaks
    to the supervisor, tests use an exchange within one process.

    Notes
    -----
    Implementations are thread-safe.  Every method raises `ChannelClosedError` when the session is gone.
    """

    @property
    def client(self) -> int:
        """Client number of this process in the session."""
        ...

    def register(
        self, segment: int, nbytes: int, fd: int, *, writable: bool, path: str = "", memory: int = 0
    ) -> None:
        """Register an own segment and hold it, without waiting; the caller keeps `fd`.

        `path` is its name in the file system, if it has one that a process has to remove; `memory` says which
        block of memory it is a use of, if there may be others.
        """
        ...

    def intend(self, path: str) -> None:
        """Announce a name before it exists, so that it is removed whenever this process dies."""
        ...

    def removed(self, path: str) -> None:
        """Record that an announced name was removed, or never created; harmless if it was not announced."""
        ...

    def fetch(self, segment: int, *, writable: bool, memory: int = 0) -> int:
        """Hold a segment and return a descriptor of it, which the caller closes.

        `memory` says which block of memory it is to be a use of; 0: it does not matter.

        Raises
        ------
        SegmentLostError
            Its memory is no longer there, or no answer came within the bound.
        ReadOnlyArrayError
            `writable` was asked for, and its creator does not allow that.
        FileDescriptorLimitError
            The supervisor or this process has no descriptor left.
        """
        ...

    def release(self, segment: int, memory: int = 0) -> None:
        """End this process's hold; harmless if there is none.

        With `memory` it stays mapped here: this process may `hold` its next use, and is sent ``UNMAP``.
        """
        ...

    def hold(self, segment: int, memory: int, *, writable: bool) -> None:
        """Hold a use of a memory that is still mapped here, as a `release` said.  Waits for no answer.

        To be called before the sender of the handle learns that it has arrived.
        """
        ...

    def freed(self, memory: int) -> None:
        """Record that an own memory went back to the system: processes that map it are sent ``UNMAP``.

        With memory 0 every other process is, which then returns all that it keeps for reuse.
        """
        ...

    def allow_write(self, segment: int) -> None:
        """Let other processes write to an own segment from now on."""
        ...

    def forget(self, segment: int) -> None:
        """End the hold of an own segment, without a later ``IDLE`` message."""
        ...

    def notices(self) -> Sequence[Notice]:
        """Return the notices that have come in since the last call, without waiting."""
        ...
