"""Segment broker: the protocol by which a store registers, fetches and releases segments of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nbparallel.wire.segments import FramePayload, Notice


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

    def send(self, message: FramePayload, fd: int | None = None) -> None:
        """Send a message of `wire.segments`, with a descriptor that the caller keeps; waits for no answer."""

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

    def notices(self) -> Sequence[Notice]:
        """Return the notices that have come in since the last call, without waiting."""
