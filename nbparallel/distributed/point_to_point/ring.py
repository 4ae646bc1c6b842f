"""Ring buffers in shared memory: the bytes from one rank to another, one writer and one reader each.

The tail counts bytes that were put in, the head bytes that were taken out; both only grow, so that their
difference is the number of bytes in the ring, and nothing has to be reset.  A record becomes visible when the
tail is written, after all its bytes; its room is free when the head is written, after all of them were copied
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.runtime.waiting import Waiter
from nbparallel.errors import ProtocolError
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import RECORD, RECORD_ALIGN

AnyArray = npt.NDArray[Any]


@dataclass(slots=True)
class Envelope:
    """One record, copied out of a ring."""

    source: int
    number: int
    """Of the messages from this source, from 1."""
    kind: int
    tag: int
    line: int
    meta: bytes
    body: bytes | memoryview
    group: int = 0
    """The word of its group; 0: the world."""
    cell: str = ""
    """The earlier cell that sent it; empty: the one that runs."""


class RingWriter:
    """The writing end of a ring."""

    def __init__(self, view: ControlView, waiter: Waiter, source: int, destination: int) -> None:
        layout = view.layout
        self._words, self._octets, self._waiter = view.words, view.octets, waiter
        self._tail, self._head = layout.tail_word(source, destination), layout.head_word(source, destination)
        self._start, self.capacity = layout.ring_byte(source, destination), layout.ring_capacity
        self._destination = destination
        self.position = view.words[self._tail]
        self.number = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether a record of so many bytes fits now."""
        return self.position + nbytes - self._words[self._head] <= self.capacity

    def taken(self) -> int:
        """Return the number of the last message up to which the receiver has taken all."""
        return self._words[self._head + 1]

    def newest_taken(self) -> int:
        """Return the highest number of any message that the receiver has taken."""
        return self._words[self._head + 2]

    def put(self, record: bytes) -> None:
        """Write a record for which there is room, and announce it."""
        nbytes = len(record)
        offset = self.position % self.capacity
        first = min(nbytes, self.capacity - offset)
        start = self._start + offset
        self._octets[start : start + first] = record[:first] if first < nbytes else record
        if first < nbytes:
            self._octets[self._start : self._start + nbytes - first] = record[first:]
        position = self.position + ((nbytes + RECORD_ALIGN - 1) & -RECORD_ALIGN)
        self._waiter.announce_to(self._destination, self._words, self._tail, position)
        self.position = position
        self.number += 1

    def put_contiguous(self, record: bytes) -> bool:
        """Write and announce a record if there is room for it in one piece; whether it was written."""
        nbytes, position = len(record), self.position
        offset = position % self.capacity
        room = self.capacity - nbytes
        if offset > room or position - self._words[self._head] > room:
            return False
        start = self._start + offset
        self._octets[start : start + nbytes] = record
        position += (nbytes + RECORD_ALIGN - 1) & -RECORD_ALIGN
        self._waiter.announce_to(self._destination, self._words, self._tail, position)
        self.position = position
        self.number += 1
        return True


class RingReader:
    """The reading end of a ring."""

    def __init__(self, view: ControlView, waiter: Waiter, source: int, destination: int) -> None:
        layout = view.layout
        self._words, self._octets, self._waiter = view.words, view.octets, waiter
        self._tail, self._head = layout.tail_word(source, destination), layout.head_word(source, destination)
        self._start, self._capacity = layout.ring_byte(source, destination), layout.ring_capacity
        self._source = source
        self._position = view.words[self._head]
        self.number = 0

    def has_message(self) -> bool:
        """Whether a record is there."""
        return self._words[self._tail] != self._position

    def has_message_before(self, position: int) -> bool:
        """Whether a record is there that begins before a position of the ring."""
        return self._position < min(position, self._words[self._tail])

    def take(self) -> Envelope:
        """Copy the next record out and release its room."""
        available = self._words[self._tail] - self._position
        if not self._waiter.strong_order:
            self._waiter.fence()  # the record's bytes after the word that announced them
        position = self._position
        offset = position % self._capacity
        start = self._start + offset
        # As nearly always: the record does not wrap around.
        whole = RECORD.size <= available <= self._capacity - offset
        head = self._octets[start : start + RECORD.size] if whole else self._copy(position, RECORD.size)
        length, meta_length, kind, tag, line, group = RECORD.unpack(head)
        if not RECORD.size + meta_length <= length <= available:
            raise ProtocolError(f"a damaged record from rank {self._source}: {head.hex()}")
        if whole:
            data = bytes(self._octets[start + RECORD.size : start + length])
        else:
            data = self._copy(position + RECORD.size, length - RECORD.size)
        self.number += 1
        self._position = position = position + ((length + RECORD_ALIGN - 1) & -RECORD_ALIGN)
        self._waiter.announce_to(self._source, self._words, self._head, position)
        return Envelope(
            self._source, self.number, kind, tag, line, data[:meta_length], data[meta_length:], group
        )

    def arrives(self) -> bool:
        """Whether a record is there, or arrives within a short while."""
        words, tail, position = self._words, self._tail, self._position
        return words[tail] != position or self._waiter.spin(words, tail, position + 1)

    def take_contiguous(self, x: AnyArray, kind: int, meta: bytes, tag: int) -> int:
        """Copy the next record into `x` if it is such an array, in one piece; return its number, else 0.

        Its message counts as received: every message before it must have been received.
        """
        position, octets = self._position, self._octets
        offset = position % self._capacity
        start = self._start + offset
        if offset + RECORD.size > self._capacity:
            return 0
        if not self._waiter.strong_order:
            self._waiter.fence()  # the record's bytes after the word that announced them
        length, meta_length, its_kind, its_tag, _, group = RECORD.unpack_from(octets, start)
        begin = start + RECORD.size
        body = begin + meta_length
        if (
            its_kind != kind
            or its_tag != tag
            or group
            or offset + length > self._capacity
            or length != RECORD.size + meta_length + x.nbytes
            or octets[begin:body] != meta
        ):
            return 0
        x[...] = np.ndarray(x.shape, x.dtype, octets, body)
        self.number = number = self.number + 1
        self._position = position = position + ((length + RECORD_ALIGN - 1) & -RECORD_ALIGN)
        words, head = self._words, self._head
        words[head + 1] = words[head + 2] = number
        self._waiter.announce_to(self._source, words, head, position)
        return number

    def _copy(self, position: int, nbytes: int) -> bytes:
        offset = position % self._capacity
        first = min(nbytes, self._capacity - offset)
        start = self._start + offset
        data = bytes(self._octets[start : start + first])
        if first < nbytes:
            data += bytes(self._octets[self._start : self._start + nbytes - first])
        return data

    def acknowledge(self, all_up_to: int, newest: int) -> None:
        """Publish which messages were received: all up to one, and the newest of any."""
        if not self._waiter.strong_order:
            self._waiter.fence()  # what was read of the sender's memory before the word that releases it
        self._words[self._head + 1] = all_up_to
        self._waiter.announce_to(self._source, self._words, self._head + 2, newest)


class RingPairs:
    """The rings of one rank: to and from every rank, itself included."""

    def __init__(
        self, view: ControlView, waiter: Waiter, rank: int, here: range | None = None, mail: Any = None
    ) -> None:
        ranks = range(view.world_size)
        near = ranks if here is None else here
        # `mail` announces what is put into rings to ranks that are not `here`
        self.writers = [RingWriter(view, waiter if r in near else mail, rank, r) for r in ranks]
        self.readers = [RingReader(view, waiter, r, rank) for r in ranks]
