"""Digest of an object's content, by which a process notices later that the object was changed in place."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

from nbparallel.transfer.checksum import checksum_buffer
from nbparallel.transfer.pickle_format import ArrayStore
from nbparallel.transfer.pickling import try_serialise

MOST_STREAM = 1 << 20
"""Bytes of the pickle stream, which take some 10 ms; a larger object has no digest."""
MOST_BUFFERS = 64 << 20
"""Bytes of large buffers, which take some 10 ms; of those beyond it only the size counts."""


class _LimitedFile(io.BytesIO):
    """A file that ends a pickler which writes too much."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_STREAM:
            raise OverflowError(f"the stream is longer than {MOST_STREAM} bytes")
        return super().write(data)


def content_digest(obj: Any, store: ArrayStore, main_globals: Mapping[str, Any]) -> bytes | None:
    """Return what changes when `obj` is changed in place; None if it is too large or cannot be pickled.

    Only digests of one object in one process are comparable: an equal object elsewhere can have another.
    Arrays in shared memory count as what they are, not by their content.
    """
    serialised = try_serialise(obj, store, main_globals, _LimitedFile())
    if serialised is None:
        return None
    digest = hashlib.blake2b(serialised.stream, digest_size=16)
    left = MOST_BUFFERS
    for buffer in serialised.buffers:
        left -= buffer.nbytes
        digest.update(checksum_buffer(buffer) if left >= 0 else buffer.nbytes.to_bytes(8, "little"))
    return digest.digest()
