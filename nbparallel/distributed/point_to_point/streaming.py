"""Streams: the content of large messages, copied through a few chunks that stay in the cache.

For each ordered pair of ranks the sender has a window of `CHUNKS` chunks in shared memory.  It copies a chunk
in, counts up, and goes on with the next; the receiver copies chunks out into the array that is to be filled,
and counts up as well.  So both work at the same time, the array is read once and written once, and no memory
is touched for the first time, which costs more than copying.

The sender never depends on the receiver: if that one does not keep up, the rest of the message is copied into
another segment, as a message that is not streamed, and the send returns.  The words of a pair::

    source:       chunks put in | the chunk from which on the rest of its message lies elsewhere
    destination:  chunks taken out | whether its last large message went into a buffer

All are counted over the whole epoch.  Chunk p lies in place p % CHUNKS; its bytes are written before "put in"
passes it and read before "taken out" does, and the place is used again only behind that.  Each side writes
its own memory only, so that a failure leaves no late writers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, decode_handle, packed_handle
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.errors import (
    FileDescriptorLimitError,
    InternalError,
    NbParallelError,
    SharedMemoryFullError,
)
from nbparallel.wire.control import Operation

CHUNK = 256 << 10
"""Bytes copied at a time: large against a load of the other side's word.  ``python -m
benchmarks.operations.tuning``:
the best three times of three on a quiet machine; 64 KiB takes a quarter longer, 512 KiB up to a fifth."""
CHUNKS = 4
"""Chunks that the sender can be ahead.  ``python -m benchmarks.operations.tuning``: what counts is that all
chunks together
(1 MiB) stay in a core's second-level cache; of 512 KiB two were best, three and more took up to a quarter
longer."""
LEAST = 32 << 10
"""Bytes of the smallest array that is streamed; smaller ones travel in the ring (`sending.INLINE`)."""
NBYTES_PER_NS = 2
"""About how fast a new segment is filled: the sender waits for a late receiver as long as that would take."""
LEAST_PATIENCE_NS = 1_000_000
SKIPPED = 8
"""Long messages that are copied after a receiver took nothing of one: it may be busy with computing."""
HEAD_NBYTES = 2 << 10
"""Bytes before the chunks: length and handle of the memory that holds the rest.  Not a page, as
`collectives.direct.MARGIN` says: 1 MB takes half the time."""
BODY = struct.Struct("<Q")
"""The number of the message's first chunk; the window's handle follows."""
_LENGTH = struct.Struct("<Q")


class Call(NamedTuple):
    """A send or a receive, as errors name it."""

    line: int
    tag: int
    deadline_ns: int | None
    number: int = 0
    """Of the message, for its sender."""


def flat_octets(x: AnyArray) -> AnyArray:
    """Return the bytes of a C-contiguous array, as an array on the same memory."""
    return np.ndarray((x.nbytes,), np.uint8, x)


def wait_for_receiver(
    context: RankContext,
    satisfied: Callable[[], bool],
    destination: int,
    call: Call,
    what: str,
    awaited: str = "it",
) -> None:
    """Wait in a send for its receiver; `what` and `awaited` are words of the error when that has left."""

    def explain(finished: list[int]) -> NbParallelError:
        place = context.call_site.place(call.line)
        return context.deadlock(
            f"rank {context.rank} waits in send(dst={destination}){place}{what}, and rank {destination} "
            + context.cell.how_gone(destination, awaited)
        )

    wait = WaitRecord(
        Operation.send, lambda: [] if satisfied() else [destination], explain, call.line,
        peer=destination, tag=call.tag, target=call.number, deadline_ns=call.deadline_ns,
    )  # fmt: skip
    context.wait(satisfied, destination, wait)


class StreamOut:
    """The sending end of a pair's stream; its window is allocated on first use in a cell."""

    def __init__(self, context: RankContext, destination: int) -> None:
        layout, rank = context.view.layout, context.rank
        self._context, self._words, self._waiter = context, context.words, context.waiter
        self._destination = destination
        self._put = layout.tail_word(rank, destination) + 1
        self._taken = layout.head_word(rank, destination) + 3
        self._window: AnyArray | None = None
        self._packed = b""
        self._position = self._late = 0

    def offer(self, nbytes: int) -> bytes | None:
        """Return the message's body, which names the chunks; None: a copy is better than a stream.

        What fits into the window needs no receiver to take it out while it is written.  More is only streamed
        to a receiver that has filled a buffer before: other receivers keep the segment of a copy.
        """
        ahead = self._position - self._words[self._taken]
        if ahead * CHUNK + nbytes > CHUNKS * CHUNK:
            if ahead or not self._words[self._taken + 1]:
                return None
            if self._late:
                self._late -= 1
                return None
        elif ahead + -(-nbytes // CHUNK) > CHUNKS:
            return None
        self.memory()
        return BODY.pack(self._position) + self._packed

    def write(self, x: AnyArray, call: Call, hold: Callable[[AnyArray], None]) -> None:
        """Put in all of a C-contiguous `x`; `hold` is given memory that must live until that was taken."""
        data, words = flat_octets(x), self._words
        begin = self._position
        end = begin + -(-data.size // CHUNK)
        for start in range(0, data.size, CHUNK):
            position = self._position
            if position - words[self._taken] >= CHUNKS and not self._is_followed(data.size - start):
                rest = self.copy_rest(data[start:])
                if rest is not None:
                    self._late = SKIPPED if words[self._taken] == begin else 0
                    hold(rest)  # before it is announced: an interrupt may come in between
                    self.put_rest(rest, end)
                    return
                wait_for_receiver(
                    self._context, self._has_room, self._destination, call,
                    ": there is no memory for a copy of what it sends",
                )  # fmt: skip
            window, place = self.memory(), HEAD_NBYTES + position % CHUNKS * CHUNK
            part = data[start : start + CHUNK]
            window[place : place + part.size] = part
            self._position = position + 1
            self._waiter.announce(words, self._put, position + 1)
            # fault: half_payload

    def memory(self) -> AnyArray:
        """Return the window, allocated on first use."""
        if self._window is None:
            window = self._context.store.empty((HEAD_NBYTES + CHUNKS * CHUNK,), np.uint8)
            self._packed = packed_handle(self._context.store, window, writable=False)
            self._window = window
        return self._window

    def _has_room(self) -> bool:
        return self._position - self._words[self._taken] < CHUNKS

    def _is_followed(self, nbytes: int) -> bool:
        """Wait a little for the receiver, which has `nbytes` to copy; whether there is room now."""
        if self._waiter.spin(self._words, self._taken, self._position - CHUNKS + 1):
            return True
        patience = max(LEAST_PATIENCE_NS, nbytes // NBYTES_PER_NS)
        return self._waiter.until(self._has_room, self._destination, limit_ns=patience)

    def copy_rest(self, data: AnyArray) -> AnyArray | None:
        """Return the rest of a message in another segment; None if there is no memory: it has to wait."""
        try:
            rest = self._context.store.empty((data.size,), np.uint8)
        except (SharedMemoryFullError, FileDescriptorLimitError):
            return None
        rest[...] = data
        return rest

    def put_rest(self, rest: AnyArray, end: int) -> None:
        """Announce where the rest of a message lies; `end` is the number behind its last chunk."""
        window, packed = self.memory(), packed_handle(self._context.store, rest, writable=False)
        window[: _LENGTH.size + len(packed)] = np.frombuffer(_LENGTH.pack(len(packed)) + packed, np.uint8)
        self._words[self._put + 1] = self._position
        self._position = end
        self._waiter.announce(self._words, self._put, end)

    def release(self) -> None:
        """Release the window, if the receiver has read all of it; the next message allocates another one."""
        if self._position == self._words[self._taken]:
            self._window = None


class StreamIn:
    """The receiving end of a pair's stream."""

    def __init__(self, context: RankContext, source: int) -> None:
        layout, rank = context.view.layout, context.rank
        self._context, self._words, self._waiter = context, context.words, context.waiter
        self._source = source
        self._put = layout.tail_word(source, rank) + 1
        self._taken = layout.head_word(source, rank) + 3
        self._window: AnyArray | None = None
        self._packed = b""

    def prefer(self, *, buffers: bool) -> None:
        """Publish how the last large message was received: the next one probably will be, too."""
        self._words[self._taken + 1] = buffers

    def read(self, x: AnyArray, body: bytes | memoryview, call: Call) -> None:
        """Fill a C-contiguous `x` with the content of a message."""
        words, waiter = self._words, self._waiter
        (base,) = BODY.unpack_from(body)
        window, data = self.attach_window(bytes(body[BODY.size :])), flat_octets(x)
        for position, start in enumerate(range(0, data.size, CHUNK), base):
            if words[self._put] <= position and not waiter.spin(words, self._put, position + 1):
                self._wait_for(position, call)
            if not waiter.strong_order:
                waiter.fence()  # the chunk after the word that announced it
            if base < words[self._put + 1] <= position:
                data[start:] = self.attach_rest(window)
                break
            place = HEAD_NBYTES + position % CHUNKS * CHUNK
            part = data[start : start + CHUNK]
            part[...] = window[place : place + part.size]
            waiter.announce(words, self._taken, position + 1)
            # fault: half_payload
        waiter.announce(words, self._taken, base + -(-data.size // CHUNK))

    def attach_window(self, packed: bytes) -> AnyArray:
        """Return the sender's window, which stays attached until the cell ends."""
        if self._window is None or packed != self._packed:
            self._window = self._context.attach(decode_handle(packed), writable=False)
            self._packed = packed
        return self._window

    def attach_rest(self, window: AnyArray) -> AnyArray:
        """Return the rest of a message, which the window names."""
        (length,) = _LENGTH.unpack_from(window.data)
        packed = window[_LENGTH.size : _LENGTH.size + length].tobytes()
        return self._context.attach(decode_handle(packed), writable=False)

    def _wait_for(self, position: int, call: Call) -> None:
        """Wait for a chunk of a sender that is writing it: never part of a deadlock."""
        context, words, source = self._context, self._words, self._source

        def arrived() -> bool:
            return words[self._put] > position

        wait = WaitRecord(
            Operation.recv, lambda: [] if arrived() else [source],
            lambda _: InternalError(f"rank {source} ended the cell in the middle of a message"), call.line,
            peer=source, tag=call.tag, deadline_ns=call.deadline_ns,
        )  # fmt: skip
        context.waiter.until(arrived, source, check=lambda: context.check_alone(wait))

    def skip(self, nbytes: int, body: bytes | memoryview) -> None:
        """Count a message as taken that is not read; all before it must have been taken."""
        (base,) = BODY.unpack_from(body)
        self._waiter.announce(self._words, self._taken, base + -(-nbytes // CHUNK))

    def release(self) -> None:
        """Release the sender's window; the next message names it again."""
        self._window = None
