"""Letters: what a member of a group leaves in its slot when values are to be moved.

A letter holds parcels (one for everybody, or one for each member), the *form* of each (dtype and shape, or
"an object", as one word), the forms of the buffers that its writer wants to fill, and the shared memory that
it will read or write.  So every member can check what every other brings and expects, before any buffer is
touched::

    head | forms brought | forms expected | spans | offsets | parcels

A letter that is too long for a slot lies in shared memory of its own, and the slot holds its handle.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.point_to_point.packing import Payload
from nbparallel.distributed.point_to_point.ring import Envelope
from nbparallel.distributed.slots.overlaps import Span

_HEAD = struct.Struct("<BBHHHQ")
"""Where the letter lies, whether its writer waits for readers; numbers of parcels, expected forms, spans, and
of the rounds in which large arrays come; elsewhere: the length of the handle."""
_PARCEL = struct.Struct("<BxH")
"""Kind, and length of the description before the body."""
_SPAN = struct.Struct("<QQQ")
HERE, ELSEWHERE = 1, 2
OBJECT_FORM = 1
"""What is no array."""
_WRITES = 1 << 63
OVERHEAD = 64
"""More than a parcel costs beside its own bytes."""
NOTHING = Payload(0, b"", b"")
"""Stands for what its writer takes itself."""


def form_word(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return dtype and shape as one word: equal for arrays that can be copied into each other."""
    text = repr((dtype.str, str(dtype), shape)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 2


@dataclass(slots=True)
class ExchangeRecordBuilder:
    """A letter that is being written."""

    payloads: list[Payload]
    """None, one for everybody, or one for each member."""
    brought: list[int]
    """Their forms."""
    expected: Sequence[int] = ()
    """Forms of buffers: one (from the only member that sends), or one for each member; 0: anything."""
    reads: Sequence[Span] = ()
    """The writer's own shared memory that others read."""
    writes: Sequence[Span] = ()
    """The shared memory that the writer will write."""
    waits: bool = False
    """Whether the writer waits until everybody has read its memory."""
    rounds: int = 0
    """In how many steps the writer brings large arrays (`relaying`)."""

    def pack(self) -> bytes:
        """Return the letter."""
        bodies = [_PARCEL.pack(p.kind, len(p.meta)) + p.meta + p.body for p in self.payloads]
        spans = [_SPAN.pack(*span) for span in self.reads]
        spans += [_SPAN.pack(segment | _WRITES, start, stop) for segment, start, stop in self.writes]
        count, expected = len(bodies), len(self.expected)
        offset = _HEAD.size + 8 * (count + expected) + _SPAN.size * len(spans) + 8 * (count + 1)
        offsets = [offset]
        for body in bodies:
            offset += len(body)
            offsets.append(offset)
        head = _HEAD.pack(HERE, self.waits, count, expected, len(spans), self.rounds)
        forms = struct.pack(f"<{count + expected}Q", *self.brought, *self.expected)
        return b"".join([head, forms, *spans, struct.pack(f"<{count + 1}Q", *offsets), *bodies])


def refer(packed: bytes, *, waits: bool) -> bytes:
    """Return what stands in the slot for a letter that lies elsewhere."""
    return _HEAD.pack(ELSEWHERE, waits, 0, 0, 0, len(packed)) + packed


def reference(data: memoryview) -> bytes | None:
    """Return the handle of a letter that lies elsewhere, None if it is here."""
    kind, _, _, _, _, length = _HEAD.unpack_from(data)
    return None if kind == HERE else bytes(data[_HEAD.size : _HEAD.size + length])


class ExchangeRecord:
    """A letter as its readers see it."""

    __slots__ = ("_data", "_expected", "_payloads", "_spans", "rounds", "waits")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        _, waits, self._payloads, self._expected, self._spans, self.rounds = _HEAD.unpack_from(data)
        self.waits = bool(waits)

    @property
    def expects(self) -> bool:
        """Whether its writer has buffers to fill."""
        return bool(self._expected)

    def brought(self, reader: int) -> int:
        """Return the form of what is meant for a member; 0: nothing is."""
        if not self._payloads:
            return 0
        at = reader if self._payloads > 1 else 0
        return int.from_bytes(self._data[_HEAD.size + 8 * at : _HEAD.size + 8 * at + 8], "little")

    def expected(self, source: int, root: int | None) -> int:
        """Return the form that is expected of a member; 0: anything."""
        if self._expected > 1 or (self._expected == 1 and root is None):
            at = source
        elif self._expected and source == root:
            at = 0
        else:
            return 0
        start = _HEAD.size + 8 * (self._payloads + at)
        return int.from_bytes(self._data[start : start + 8], "little")

    def spans(self) -> list[tuple[Span, bool]]:
        """Return the shared memory that is read or written, and which of the two."""
        start = _HEAD.size + 8 * (self._payloads + self._expected)
        found = []
        for i in range(self._spans):
            segment, first, last = _SPAN.unpack_from(self._data, start + i * _SPAN.size)
            found.append(((segment & ~_WRITES, first, last), bool(segment & _WRITES)))
        return found

    def payload(self, writer: int, reader: int) -> Envelope:
        """Return what is meant for a member; its bytes are those of the slot."""
        at = reader if self._payloads > 1 else 0
        table = _HEAD.size + 8 * (self._payloads + self._expected) + _SPAN.size * self._spans
        start, stop = struct.unpack_from("<QQ", self._data, table + 8 * at)
        kind, length = _PARCEL.unpack_from(self._data, start)
        middle = start + _PARCEL.size + length
        meta = bytes(self._data[start + _PARCEL.size : middle])
        return Envelope(writer, 0, kind, 0, 0, meta, self._data[middle:stop])
