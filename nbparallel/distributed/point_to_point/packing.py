"""Payloads: values packed to travel in a ring or to be read from a slot, and unpacked.

Small values are inline: they travel inside the record.  A large array is indirect: its sender copies it once
into a new segment, which the receiver adopts; a large pickle likewise.  The sender holds that segment until
the receiver has acknowledged the message: from then on it is the receiver's alone.  A receiver that fills
buffers gets large arrays through a stream (`streaming`), and every receiver gets what fits into its window.
"""

from __future__ import annotations

import marshal
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nbparallel.distributed.point_to_point.streaming import LEAST, StreamOut
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    Cache,
    as_plain_array,
    decode_handle,
    encode_handle,
    packed_handle,
)
from nbparallel.distributed.runtime.waiting import Waiter
from nbparallel.errors import ProtocolError
from nbparallel.sharing.memory.array_layout import rebuild_dtype
from nbparallel.sharing.tensors import is_tensor, tensor_of
from nbparallel.transfer import pickling
from nbparallel.transfer.pickle_format import BY_VALUE
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import RECORD, RECORD_ALIGN

# Ring buffers in shared memory: the bytes from one rank to another, one writer and one reader each.
#
# The tail counts bytes that were put in, the head bytes that were taken out; both only grow, so that their
# difference is the number of bytes in the ring, and nothing has to be reset.  A record becomes visible when
# the tail is written, after all its bytes; its room is free when the head is written, after all of them
# were copied out.


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

    def __init__(self, view: ControlView, waiter: Any, source: int, destination: int) -> None:
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


ARRAY, ADOPTED, VIEW, NUMBER, OBJECT, BLOB, INTRODUCTION, STREAMED, PLACE, AWAY = range(1, 11)
"""Kinds of payloads: an inline array, one in shared memory, a handle of the sender's own array, a builtin, an
inline pickle, a pickle in shared memory; a group's slot area, which is no user's message; an array whose
content comes through a stream; where a private array lies; where content lies that the receiver asks for."""
SHORT = 32 << 10
"""Bytes up to which an array is short: what a ring takes.  ``python -m benchmarks.operations.tuning``: the
ordinary path takes more than twice as long at 3 and 12 KiB, and half as long again at 30 KiB."""
TENSOR = b"t"
"""Begins the description of an array that was sent as a tensor; no pickle begins so."""
PRIVATE = (
    "view=True sends where an array lies, and this one's memory is private: share it first "
    "(`x = nbp.share(x)`), or send without view=True"
)
LARGEST_META = 1024
"""Bytes of a description beside which content does not travel in the ring."""
_BUILTINS = (int, float, complex, bool, str, bytes, type(None))


@dataclass(slots=True)
class Payload:
    """A packed value."""

    kind: int
    meta: bytes
    body: bytes
    keepalive: object = None
    """What must live until the receiver has acknowledged."""
    nbytes: int = 0

    def record(self, tag: int, line: int, group: int = 0) -> bytes:
        """Return the bytes for a ring."""
        length = RECORD.size + len(self.meta) + len(self.body)
        return RECORD.pack(length, len(self.meta), self.kind, tag, line, group) + self.meta + self.body


def brings_tensor(message: Envelope) -> bool:
    """Return whether a tensor was sent: its array is to arrive as one."""
    return message.meta[:1] == TENSOR


class Packer:
    """Packs and unpacks the values of one rank.

    Parameters
    ----------
    inline : int
        Bytes that can travel inside a record.
    """

    def __init__(self, context: RankContext, inline: int) -> None:
        self._store, self._attach, self._inline = context.store, context.attach, inline
        self._attach_view = context.memory.attach_view
        self._metas: Cache[Any, bytes] = Cache()
        self._forms: Cache[bytes, tuple[np.dtype[Any], tuple[int, ...]]] = Cache()
        self._shown: tuple[weakref.ref[AnyArray], tuple[Any, ...], bytes] | None = None
        """The array whose handle was sent last, its form, and the handle: often sent to several ranks."""

    def pack(self, x: Any, *, view: bool, stream: StreamOut | None = None) -> Payload:
        """Return `x` as a payload; changes of `x` after this do not reach the receiver (but for a view).

        `STREAMED` only announces the array: the sender has to write it to `stream`.
        """
        elsewhere = None if stream is None else partial(self._pack_stream, stream)
        return self._packed(x, self._inline, view, elsewhere, ADOPTED)

    def leave(
        self,
        x: Any,
        inline: int,
        *,
        view: bool,
        readers: int,
        offer: Callable[[AnyArray], bytes] | None = None,
    ) -> Payload:
        """Return `x` as a payload to be read from a slot, while the sender waits for its readers.

        A shared array stays where it is, and every reader copies it from there (kind `VIEW`).  Of a large
        private one `offer` says where it lies, if readers can read it there (kind `PLACE`); else it is copied
        to shared memory, where a single reader keeps it and several copy it.
        """
        elsewhere = partial(self._pack_where_it_lies, offer)
        return self._packed(x, inline, view, elsewhere, ADOPTED if readers == 1 else VIEW)

    def _packed(
        self,
        x: Any,
        inline: int,
        view: bool,
        elsewhere: Callable[[AnyArray, bool], Payload | None] | None,
        kind: int,
    ) -> Payload:
        array = as_plain_array(x)
        if view:
            return self._pack_view(x, array)
        if array is None:
            return self._pack_other(x, inline)
        tensor = array is not x and is_tensor(x)
        payload = self._pack_inline(array, inline, tensor)
        if payload is None and elsewhere is not None:
            payload = elsewhere(array, tensor)
        return payload or self._pack_copy(array, kind, tensor)

    def _pack_where_it_lies(
        self, offer: Callable[[AnyArray], bytes] | None, array: AnyArray, tensor: bool
    ) -> Payload | None:
        handle = self._store.handle(array, writable=False)
        if handle is not None:
            return Payload(VIEW, TENSOR if tensor else b"", encode_handle(handle), None, array.nbytes)
        if offer is not None and array.flags.c_contiguous and (place := offer(array)):
            # what stands for a value may be a copy (of a conjugated tensor), that only this refers to
            return Payload(PLACE, self.meta(array, tensor), place, array, array.nbytes)
        return None

    def pack_away(self, x: Any) -> Payload:
        """Return `x` as a payload for a rank elsewhere: a large one stays here until that asks for it."""
        array = as_plain_array(x)
        if array is None or len(self.meta(array)) > LARGEST_META:
            data, meta, kind = pickling.dumps(x, BY_VALUE).data, b"", OBJECT
            if len(data) <= self._inline:
                return Payload(kind, meta, data, nbytes=len(data))
            array = np.frombuffer(data, np.uint8)
        else:
            tensor = array is not x and is_tensor(x)
            if (payload := self._pack_inline(array, self._inline, tensor)) is not None:
                return payload
            meta = self.meta(array, tensor)
        copy = self._pack_copy(array, AWAY, False)
        copy.meta = meta
        return copy

    def _pack_other(self, x: Any, inline: int) -> Payload:
        if type(x) in _BUILTINS:
            data = marshal.dumps(x)
            if len(data) <= inline:
                return Payload(NUMBER, b"", data, nbytes=len(data))
        keepalive = pickling.dumps(x, self._store)
        if len(data := keepalive.data) <= inline:
            return Payload(OBJECT, b"", data, keepalive, len(data))
        blob, handle = self.in_memory(data)
        return Payload(BLOB, b"", handle, (blob, keepalive), len(data))

    def in_memory(self, data: bytes) -> tuple[AnyArray, bytes]:
        """Return shared memory of their own for bytes, and its handle."""
        memory = self._store.empty((len(data),), np.uint8)
        memory[...] = np.frombuffer(data, np.uint8)
        return memory, packed_handle(self._store, memory, writable=False)

    def _pack_view(self, x: Any, array: AnyArray | None) -> Payload:
        if array is None:
            raise TypeError(f"view=True needs a numpy array in shared memory, not {type(x).__name__}")
        if is_tensor(x):
            return self._pack_tensor_view(array)
        form = (array.shape, array.strides, array.dtype, self._store.rights_changes)
        shown = self._shown
        if shown is not None and shown[0]() is array and shown[1] == form:
            return Payload(VIEW, b"", shown[2], array, 0)
        handle = self._store.handle(array, writable=False)
        if handle is None:
            raise ValueError(PRIVATE)
        packed = encode_handle(handle)
        self._shown = weakref.ref(array), form, packed
        return Payload(VIEW, b"", packed, array, 0)

    def _pack_tensor_view(self, array: AnyArray) -> Payload:
        """Return where a tensor lies: every rank may write there, since torch cannot keep one from it."""
        location = self._store.location(array)
        handle = None if location is None else self._store.handle(array, writable=location.for_all)
        if handle is None:
            raise ValueError(PRIVATE)
        if not handle.writable:
            raise ValueError(
                "view=True sends where this tensor lies, which other ranks may only read, and torch has no "
                "tensors for reading only: send `x.numpy()`, or without view=True"
            )
        return Payload(VIEW, TENSOR, encode_handle(handle), array, 0)

    def _pack_inline(self, array: AnyArray, inline: int, tensor: bool) -> Payload | None:
        nbytes = array.nbytes
        if nbytes <= inline:
            meta = self.meta(array, tensor)
            if len(meta) <= min(self._inline, 0xFFFF):
                return Payload(ARRAY, meta, array.tobytes(), nbytes=nbytes)
        return None

    def meta(self, array: AnyArray, tensor: bool = False) -> bytes:
        """Return dtype and shape as they stand in a record, and whether a `tensor` is sent."""
        key = (array.dtype, array.shape)
        meta = self._metas.get(key)
        if meta is None:
            meta = pickle.dumps(key, 5)
            if len(meta) < self._inline:
                self._metas[key] = meta
        return TENSOR + meta if tensor else meta

    def short_meta(self, array: AnyArray) -> bytes:
        """Return dtype and shape of a short array as they stand in a record; empty: it is not short."""
        if array.nbytes > SHORT or array.dtype.hasobject:
            return b""
        meta = self.meta(array)
        return meta if len(meta) <= SHORT else b""

    def _pack_stream(self, stream: StreamOut, array: AnyArray, tensor: bool) -> Payload | None:
        if (
            array.nbytes >= LEAST
            and array.flags.c_contiguous
            and len(meta := self.meta(array, tensor)) <= LARGEST_META
        ):
            body = stream.offer(array.nbytes)
            if body is not None:
                return Payload(STREAMED, meta, body, nbytes=array.nbytes)
        return None

    def _pack_copy(self, array: AnyArray, kind: int, tensor: bool) -> Payload:
        copy = self._store.empty(array.shape, array.dtype)
        np.copyto(copy, array)
        return Payload(
            kind,
            TENSOR if tensor else b"",
            packed_handle(self._store, copy, writable=kind == ADOPTED),
            copy,
            array.nbytes,
        )

    # -- receiving -------------------------------------------------------------------------------------

    def form(self, message: Envelope) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """Return dtype and shape of the array that a message brings, None if it brings none."""
        if message.kind in (ARRAY, STREAMED, PLACE) or (message.kind == AWAY and message.meta):
            form = self._forms.get(message.meta)
            if form is None:
                form = pickle.loads(message.meta.removeprefix(TENSOR))
                self._forms[message.meta] = form
            return form
        if message.kind in (ADOPTED, VIEW):
            handle = decode_handle(message.body)
            return rebuild_dtype(handle.dtype), handle.shape
        return None

    def unpack(self, message: Envelope) -> Any:
        """Return the value; it belongs to the receiver, but for a view, which is read-only.

        A view of a tensor can be written to: torch has no tensors for reading only.
        """
        kind, tensor = message.kind, brings_tensor(message)
        if kind == NUMBER:
            return marshal.loads(message.body)
        if kind == OBJECT:
            return pickling.loads(message.body, self._store)
        if kind == BLOB:
            return pickling.loads(self.content(message).tobytes(), self._store)
        if kind == ARRAY:
            array = np.array(self.content(message))
        else:
            writable = kind == ADOPTED or tensor
            array = self._attach(decode_handle(message.body), writable=writable)
        return tensor_of(array) if tensor else array

    def content(self, message: Envelope) -> AnyArray:
        """Return the array of a message where it lies, for reading."""
        if message.kind == ARRAY and (form := self.form(message)) is not None:
            return np.ndarray(form[1], form[0], message.body)
        if message.kind == VIEW:
            return self._attach_view(message.body)
        return self._attach(decode_handle(message.body), writable=False)

    def fill(self, buffer: AnyArray, message: Envelope) -> None:
        """Copy the array of a message into `buffer`, which has its dtype and shape."""
        np.copyto(buffer, self.content(message))
