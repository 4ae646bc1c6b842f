"""PipeReader: messages of a pipe as far as they have come."""

from __future__ import annotations

import os
import struct
from typing import Any

_LENGTH = struct.Struct("!i")
"""Before each message, as `multiprocessing.connection` writes it; -1: `_LONG_LENGTH` follows."""
_LONG_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20
"""Bytes of one read at most."""


class PipeReader:
    """Reads messages of bytes, and never waits for the rest of one, whose writer may be dead.

    Parameters
    ----------
    end : Connection
        A reading end; it no longer blocks.

    Attributes
    ----------
    ended : bool
        Whether no process can write any more.
    """

    def __init__(self, end: Any) -> None:
        self.end, self.ended = end, False
        self._bytes = bytearray()
        os.set_blocking(end.fileno(), False)

    def read(self) -> list[bytes]:
        """Return the messages that are there as a whole now."""
        while not self.ended:
            try:
                part = os.read(self.end.fileno(), _CHUNK)
            except BlockingIOError:
                break
            self._bytes += part
            self.ended = not part
        found = []
        while (message := self._take()) is not None:
            found.append(message)
        return found

    def _take(self) -> bytes | None:
        head = _LENGTH.size
        if len(self._bytes) < head:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._bytes)
        if nbytes < 0:
            head += _LONG_LENGTH.size
            if len(self._bytes) < head:
                return None
            (nbytes,) = _LONG_LENGTH.unpack_from(self._bytes, _LENGTH.size)
        if len(self._bytes) < head + nbytes:
            return None
        message = bytes(memoryview(self._bytes)[head : head + nbytes])
        del self._bytes[: head + nbytes]
        return message
