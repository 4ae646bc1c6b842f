"""Exchange records: what each rank writes into its slot for a data movement.

A record holds payloads (one for all members, or one for each), the *form* of each payload (dtype and shape,
or "an object", as one word), the forms of the arrays that its writer fills, and the shared memory that it
reads or writes.  So every member can check what every other member sends and expects, before any array is
written::

    head | forms sent | forms expected | spans | offsets | payloads

Forms that are all the same are written once: so a member that moves equal arrays need not look at every pair
of members, whose number is the square of theirs.

A record that is too long for a slot lies in shared memory of its own (indirect), and the slot holds its
handle.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.point_to_point.packing import Payload
from nbparallel.distributed.point_to_point.ring import Envelope
from nbparallel.distributed.slots.overlaps import Span

_HEAD = struct.Struct("<BBHHHHQ")
"""Inline or indirect, whether the writer waits for readers; numbers of payloads, forms sent, forms expected
and spans; the number of rounds in which large arrays come, or the length of an indirect record's handle."""
_PAYLOAD = struct.Struct("<BxH")
"""Kind, and length of the description before the body."""
_SPAN = struct.Struct("<QQQ")
INLINE, INDIRECT = 1, 2
OBJECT_FORM = 1
"""The form of a value that is not an array."""
_WRITES = 1 << 63
OVERHEAD = 64
"""An upper bound of what a payload takes beside its own bytes."""
FEW = 4
"""Up to so many members pairs are compared one by one, which is quicker."""
NOTHING = Payload(0, b"", b"")
"""Stands for a value that only its own member takes."""


def form_word(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return dtype and shape as one word: equal for arrays that can be copied into each other."""
    text = repr((dtype.str, str(dtype), shape)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 2


class ExchangeRecordBuilder:
    """A record that is being written.

    Attributes
    ----------
    payloads : list of Payload
        None, one for all takers, or one for each member.
    brought : list of int
        Their forms.
    expected : sequence of int
        Forms of the arrays to fill: one (from the only member that sends), or one for each member; 0: any.
    reads : list of Span
        The writer's own shared memory that other members read.
    writes : sequence of Span
        The shared memory that the writer of the record will write.
    waits : bool
        Whether the writer waits until all members have read its memory.
    rounds : int
        Steps in which the writer's large arrays are copied (`StagedCopy`).
    keepalive : list
        What the record refers to, to be held until it was read.
    """

    __slots__ = ("brought", "expected", "keepalive", "payloads", "reads", "rounds", "waits", "writes")

    def __init__(self) -> None:
        self.payloads: list[Payload] = []
        self.brought: list[int] = []
        self.expected: Sequence[int] = ()
        self.reads: list[Span] = []
        self.writes: Sequence[Span] = ()
        self.waits = False
        self.rounds = 0
        self.keepalive: list[object] = []

    def pack(self) -> bytes:
        """Return the record as bytes."""
        bodies = [_PAYLOAD.pack(p.kind, len(p.meta)) + p.meta + p.body for p in self.payloads]
        spans = [_SPAN.pack(*span) for span in self.reads]
        if self.writes:
            spans += [_SPAN.pack(segment | _WRITES, start, stop) for segment, start, stop in self.writes]
        count, brought, expected = len(bodies), _once(self.brought), _once(self.expected)
        forms = struct.pack(f"<{len(brought) + len(expected)}Q", *brought, *expected)
        offset = _HEAD.size + len(forms) + _SPAN.size * len(spans) + 8 * (count + 1)
        offsets = [offset]
        for body in bodies:
            offset += len(body)
            offsets.append(offset)
        head = _HEAD.pack(INLINE, self.waits, count, len(brought), len(expected), len(spans), self.rounds)
        return b"".join([head, forms, *spans, struct.pack(f"<{count + 1}Q", *offsets), *bodies])


def _once(forms: Sequence[int]) -> Sequence[int]:
    """Return the first of many forms that are all the same, else all of them."""
    return forms[:1] if len(forms) > FEW and len(set(forms)) == 1 else forms


def refer(packed: bytes, *, waits: bool) -> bytes:
    """Return the slot's content for an indirect record, by the handle of its memory."""
    return _HEAD.pack(INDIRECT, waits, 0, 0, 0, 0, len(packed)) + packed


def reference(data: memoryview) -> bytes | None:
    """Return the handle of an indirect record, None for an inline one."""
    kind, *_, length = _HEAD.unpack_from(data)
    return None if kind == INLINE else bytes(data[_HEAD.size : _HEAD.size + length])


class ExchangeRecord:
    """A record as its readers see it."""

    __slots__ = ("_brought", "_data", "_expected", "_payloads", "_spans", "rounds", "waits")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        head = _HEAD.unpack_from(data)
        _, waits, self._payloads, self._brought, self._expected, self._spans, self.rounds = head
        self.waits = bool(waits)

    @property
    def expects(self) -> bool:
        """Whether its writer fills arrays."""
        return bool(self._expected)

    @property
    def form(self) -> int | None:
        """The form of the value for every member; 0 if there is none, None if they differ."""
        return self._word(0) if self._brought == 1 else None if self._brought else 0

    def brought(self, reader: int) -> int:
        """Return the form of the value for a member; 0 if there is none."""
        if not self._brought:
            return 0
        start = _HEAD.size + (8 * reader if self._brought > 1 else 0)
        return int.from_bytes(self._data[start : start + 8], "little")

    def expected(self, source: int) -> int:
        """Return the form that is expected of a member that sends; 0 accepts any."""
        start = _HEAD.size + 8 * (self._brought + (source if self._expected > 1 else 0))
        return int.from_bytes(self._data[start : start + 8], "little")

    def accepts(self, forms: tuple[int | None, ...], different: set[int | None]) -> bool:
        """Whether exactly these forms are expected of the members that send, which are all `different` ones.

        One that is None stands for several: those have to be compared one by one.
        """
        if self._expected == 1:
            return different == {self._word(self._brought)}
        start = _HEAD.size + 8 * self._brought
        return struct.unpack_from(f"<{self._expected}Q", self._data, start) == forms

    def _word(self, at: int) -> int:
        start = _HEAD.size + 8 * at
        return int.from_bytes(self._data[start : start + 8], "little")

    def spans(self) -> list[tuple[Span, bool]]:
        """Return the spans of shared memory, and whether each is written."""
        start = _HEAD.size + 8 * (self._brought + self._expected)
        found = []
        for i in range(self._spans):
            segment, first, last = _SPAN.unpack_from(self._data, start + i * _SPAN.size)
            found.append(((segment & ~_WRITES, first, last), bool(segment & _WRITES)))
        return found

    def payload(self, writer: int, reader: int) -> Envelope:
        """Return the payload for a member; its body is a view of the slot."""
        at = reader if self._payloads > 1 else 0
        table = _HEAD.size + 8 * (self._brought + self._expected) + _SPAN.size * self._spans
        start, stop = struct.unpack_from("<QQ", self._data, table + 8 * at)
        kind, length = _PAYLOAD.unpack_from(self._data, start)
        middle = start + _PAYLOAD.size + length
        meta = bytes(self._data[start + _PAYLOAD.size : middle])
        return Envelope(writer, 0, kind, 0, 0, meta, self._data[middle:stop])
