"""Outbox: frames for one peer that never make the supervisor wait."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence

from nbparallel.wire import frames

LIMIT = 200_000
"""Frames that may wait for one peer; one that takes none of them is dropped."""


class Outbox:
    """Frames on their way to one peer.

    Owns duplicates of the descriptors that wait; the socket belongs to the caller.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self.broken = False
        """Whether the peer is gone or took nothing for too long."""

    def send(
        self, kind: int, payload: bytes = b"", fds: Sequence[int] = (), *, epoch: int = 0, sequence: int = 0
    ) -> None:
        """Send now, or keep the frame until `flush`; the caller keeps its descriptors."""
        if self.broken:
            return
        data = frames.encode(kind, payload, epoch=epoch, sequence=sequence)
        if not self._waiting and (self._try(data, fds) or self.broken):
            return
        if len(self._waiting) >= LIMIT:
            self._break()
            return
        self._waiting.append((data, [os.dup(fd) for fd in fds]))

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it."""
        while self._waiting:
            data, fds = self._waiting[0]
            if not self._try(data, fds):
                return
            self._waiting.popleft()
            _close(fds)

    @property
    def waiting(self) -> bool:
        """Whether frames wait for room."""
        return bool(self._waiting)

    def _try(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            if fds:
                socket.send_fds(self._socket, [data], list(fds))
            else:
                self._socket.send(data)
        except OSError as error:
            if not isinstance(error, BlockingIOError) and error.errno not in frames.PASSING:
                self._break()
            return False
        return True

    def _break(self) -> None:
        self.broken = True
        self.close()
        try:
            # It must not wait for what it will never get.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone

    def close(self) -> None:
        """Drop what waits."""
        while self._waiting:
            _close(self._waiting.popleft()[1])


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
