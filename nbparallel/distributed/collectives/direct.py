"""Direct access to shared arrays: member i combines slice i of all members' arrays, and writes it to all.

Every input byte is read once and every output byte written once; nothing else is moved.  In blocks of 64 Ki
elements, so that the partial sums of a block stay in the cache until the last input was added.  A broadcast
is done likewise: member i copies slice i of the root's array to all others, so that no core is idle.

Private arrays are copied piece by piece into a buffer in shared memory that each rank keeps (`KeptBuffer`),
combined there, and copied back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterator, Sequence

import numpy as np

from nbparallel.distributed.operators import Operator, finish_array
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, decode_handle, packed_handle
from nbparallel.distributed.slots.slot_protocol import SlotProtocol

BLOCK = 64 << 10
"""Elements combined at a time: 256 KiB of float32.  ``python -m benchmarks.operations.tuning``: the best,
128 Ki as good; half of it takes a tenth longer, four times as much a third."""
BLOCK_NBYTES = 512 << 10
"""Bytes copied at a time.  ``python -m benchmarks.operations.tuning``: 256 KiB to 4 MiB are equal within 5
%."""
CHECK_EVERY = 16
"""Blocks between two checks whether another member has failed: well under a millisecond."""
PIECE = 2 << 20
"""Bytes of private arrays that are copied and combined at a time.  ``python -m
benchmarks.operations.tuning``."""
MARGIN = 2 << 10
"""Bytes before a buffer.  A copy of 8 to 256 KiB to where the last 12 bits of the address are a little
greater (4 or 16 bytes; 32 no more) takes up to six times as long (an EPYC's ``rep movsb``), and numpy's large
arrays begin 16 bytes behind a page's begin.  So buffers do not begin where a page does: four ranks reduce 1
MB in half the time."""


def slice_bounds(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the bounds of a slice of `count` elements; inner bounds are multiples of 64 elements."""
    size = -(-count // parts)
    size = (size + 63) & ~63
    return min(part * size, count), min((part + 1) * size, count)


def _for_each_block(
    context: RankContext,
    protocol: SlotProtocol,
    start: int,
    stop: int,
    size: int,
    work: Callable[[int, int], None],
) -> None:
    """Call ``work(begin, end)`` for each block; raises between blocks if another member has failed."""
    with np.errstate(all="ignore"):  # a warning made an error would leave the others half-way
        for i, begin in enumerate(range(start, stop, size)):
            if i % CHECK_EVERY == CHECK_EVERY - 1:
                context.check_peers(protocol.peers)
            work(begin, min(begin + size, stop))
            # fault: half_payload if i == len(range(start, stop, size)) // 2


def _write_slice(
    context: RankContext, protocol: SlotProtocol, count: int, size: int, work: Callable[[int, int], None]
) -> None:
    """Do this member's slice of `count` elements, which writes other ranks' memory, and synchronize."""
    start, stop = slice_bounds(count, protocol.index, len(protocol.ranks))
    if start < stop:
        context.may_write(protocol.number, protocol.peers)
        _for_each_block(context, protocol, start, stop, size, work)
        context.waiter.fence()
        context.words[context.writing] = 0
    protocol.synchronize()


def attached_arrays(
    context: RankContext, protocol: SlotProtocol, flat: AnyArray, writable: Container[int | None]
) -> list[AnyArray]:
    """Return the flat arrays of all members, of which each has left a handle; some are `writable`."""
    return [
        flat if i == protocol.index else context.memory.attach(bytes(protocol.get(i)), writable=i in writable)
        for i in range(len(protocol.ranks))
    ]


def direct_broadcast(
    context: RankContext, protocol: SlotProtocol, source: AnyArray, targets: list[AnyArray]
) -> None:
    """Copy this member's slice of the bytes of `source` to all targets; each member copies its own."""

    def work(begin: int, end: int) -> None:
        block = source[begin:end]
        for target in targets:
            target[begin:end] = block

    _write_slice(context, protocol, source.size, BLOCK_NBYTES, work)


def direct_reduce(
    context: RankContext,
    protocol: SlotProtocol,
    arrays: list[AnyArray],
    targets: list[AnyArray],
    operator: Operator,
) -> None:
    """Combine this member's slice of all arrays into each target; some of the arrays are the targets."""
    first, *others = targets
    combine_block = _combine_blocks(arrays, first, 0, operator)

    def work(begin: int, end: int) -> None:
        combine_block(begin, end)
        for target in others:
            target[begin:end] = first[begin:end]

    _write_slice(context, protocol, first.size, BLOCK, work)


def direct_reduce_scatter(
    context: RankContext,
    protocol: SlotProtocol,
    arrays: list[AnyArray],
    target: AnyArray,
    start: int,
    operator: Operator,
) -> None:
    """Combine the elements of all arrays from `start` on into `target`, which is none of them."""
    work = _combine_blocks(arrays, target, start, operator)
    _for_each_block(context, protocol, start, start + target.size, BLOCK, work)
    context.check_peers(protocol.peers)  # a rank that failed may be changing what was just read


def _combine_blocks(
    arrays: list[AnyArray], target: AnyArray, origin: int, operator: Operator
) -> Callable[[int, int], None]:
    """Return what combines a block in rank order; `target` begins with element `origin`."""
    partial = np.empty(min(BLOCK, target.size) if len(arrays) > 2 else 0, target.dtype)

    def work(begin: int, end: int) -> None:
        parts = [array[begin:end] for array in arrays]
        combine_parts(operator, parts, target[begin - origin : end - origin], partial[: end - begin])

    return work


def combine_parts(operator: Operator, parts: Sequence[AnyArray], out: AnyArray, partial: AnyArray) -> None:
    """Combine two arrays or more in rank order into `out`, which may be any of them."""
    total = parts[0]
    for part in parts[1:-1]:
        total = operator.ufunc(total, part, out=partial)
    operator.ufunc(total, parts[-1], out=out)
    finish_array(operator, out, len(parts))


_PLACE = struct.Struct("<Q")
"""Where in a buffer an array lies; the buffer's handle follows."""


class KeptBuffer:
    """One rank's buffer in shared memory, and those of others as attached here; they stay for the epoch.

    Others write there while a member combines, as they write into arrays of a rank that are shared: it ends
    a failed operation likewise, when none of them can any more (`Exposure`).
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._own: AnyArray | None = None
        self._handle = b""
        self._attached: dict[bytes, AnyArray] = {}

    def _memory(self) -> AnyArray:
        if self._own is None:
            own = self._context.store.empty((MARGIN + PIECE,), np.uint8)[MARGIN:]
            self._own, self._handle = own, packed_handle(self._context.store, own, writable=True)
        return self._own

    def offer(self, flat: AnyArray, parts: Sequence[tuple[int, int]] | None = None) -> bytes:
        """Copy the first piece of a flat array in; returns the buffer's handle, for the slot."""
        self._copy_in(self._memory(), flat, parts or [(0, flat.size)], 0)
        return self._handle

    def lend(self, octets: AnyArray, used: int) -> bytes:
        """Copy an array of bytes in behind what is used; returns where it lies, empty if there is no room."""
        if used + octets.size > PIECE:
            return b""
        self._memory()[used : used + octets.size] = octets
        return _PLACE.pack(used) + self._handle

    def borrow(self, place: bytes, target: AnyArray) -> None:
        """Fill an array of bytes with what another member has lent."""
        (first,) = _PLACE.unpack_from(place)
        target[...] = self._attach(place[_PLACE.size :])[first : first + target.size]

    def _copy_in(self, memory: AnyArray, flat: AnyArray, parts: Sequence[tuple[int, int]], turn: int) -> None:
        share = PIECE // flat.itemsize // len(parts)
        elements = np.ndarray((share * len(parts),), flat.dtype, memory)
        for i, (low, high) in enumerate(parts):
            piece = flat[min(low + turn * share, high) : min(low + (turn + 1) * share, high)]
            elements[i * share : i * share + piece.size] = piece
        # fault: half_payload

    def pieces(
        self, protocol: SlotProtocol, flat: AnyArray, parts: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[tuple[slice, list[AnyArray]]]:
        """Yield each piece of a flat array, and where it lies in the buffers of all members.

        Every member has left what `offer` returned.  The buffers are those of the other members again when
        all have synchronized behind a piece.

        Parameters
        ----------
        parts : sequence of (int, int), optional
            First element and the one behind the last that each member combines: it gets pieces of its own
            part alone.
        """
        index, size = protocol.index, len(protocol.ranks)
        place, bounds = (0, [(0, flat.size)]) if parts is None else (index, parts)
        share = PIECE // flat.itemsize // len(bounds)
        buffers: list[AnyArray] = []
        for i in range(size):
            memory = self._own if i == index else self._attach(bytes(protocol.get(i)))
            buffers.append(np.ndarray((share,), flat.dtype, memory, place * share * flat.itemsize))
        for turn in range(-(-max(high - low for low, high in bounds) // share)):
            if turn and self._own is not None:
                self._copy_in(self._own, flat, bounds, turn)
                protocol.synchronize()
            low, high = bounds[place]
            first = min(low + turn * share, high)
            piece = slice(first, min(first + share, high))
            yield piece, [buffer[: piece.stop - first] for buffer in buffers]

    def _attach(self, handle: bytes) -> AnyArray:
        memory = self._attached.get(handle)
        if memory is None:
            memory = self._attached[handle] = self._context.attach(decode_handle(handle), writable=True)
        return memory

    def close(self) -> None:
        """Release all memory."""
        self._own = None
        self._attached.clear()
