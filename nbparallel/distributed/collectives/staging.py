"""Staging buffers for private arrays: every rank has three chunks in one shared array of its own.

The chunks are used in turn, over all operations of an epoch.  One synchronisation a chunk is enough: a rank
that fills chunk q + 1 has passed the synchronisation of chunk q - 1, before which every member had read out
chunk q - 2, and that is the one whose place it takes.  No rank writes into another rank's buffers,
so there are no late writes after a failure.

In a reduction each rank combines a piece of every chunk.  It copies in what others combine, and reads its own
values where they are: so of N ranks' bytes (N - 1) / N are copied in, and as many out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nbparallel.distributed.collectives.direct import slice_bounds
from nbparallel.distributed.operators import Operator, combine, finish_array
from nbparallel.distributed.point_to_point.streaming import flat_octets
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, decode_handle, encode_handle
from nbparallel.distributed.slots.slot_protocol import Pipeline, SlotProtocol
from nbparallel.errors import InternalError

CHUNK = 1 << 20
"""Bytes: stays in a core's second-level cache, and is large against a synchronisation.  ``python -m
benchmarks.operations.tuning``: 1 to 4 MiB are equal within 8 %, a quarter takes a third longer."""
CHUNKS = 3
MARGIN = 2 << 10
"""Bytes before the first chunk.  A copy of 8 to 256 KiB to where the last 12 bits of the address are a little
greater (4 or 16 bytes; 32 no more) takes up to six times as long (an EPYC's ``rep movsb``), and numpy's large
arrays begin 16 bytes behind a page's begin.  So chunks do not begin where a page does: four ranks reduce 1 MB
in half the time."""
SCAN_PIECES = 4
"""Pieces of a scan for each member but the last."""
MIN_SCAN_NBYTES = 64 << 10
"""Bytes of a piece of a scan, at least."""


class StagingLayout:
    """Which elements each member combines, chunk by chunk, and where in the chunk they lie.

    Parameters
    ----------
    count : int
        Elements of a member's array.
    itemsize : int
        Their bytes.
    parts : sequence of (int, int), optional
        The elements that each member wants, if it wants no others: then it combines these, and no other
        member reads the result.  Without it each chunk is divided among all members.

    Attributes
    ----------
    chunks : int
        How many there are.
    shown : bool
        Whether results are read by others.
    """

    def __init__(
        self, count: int, itemsize: int, members: int, parts: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self._count, self._size, self._members, self._parts = count, CHUNK // itemsize, members, parts
        self._share = self._size // members
        self.shown = parts is None
        longest = max(high - low for low, high in parts) if parts is not None else 0
        self.chunks = -(-longest // self._share) if parts is not None else -(-count // self._size)

    def __call__(self, chunk: int, member: int) -> tuple[int, int, int]:
        """Return the bounds of a member's piece, in elements of the array, and its offset in the chunk."""
        if self._parts is None:
            begin = chunk * self._size
            low, high = slice_bounds(min(self._size, self._count - begin), member, self._members)
            return begin + low, begin + high, low
        first, last = self._parts[member]
        low = min(first + chunk * self._share, last)
        return low, min(low + self._share, last), member * self._share


class StagingBuffers:
    """One rank's staging buffers and the others' as attached here; all are made on first use."""

    def __init__(self, context: RankContext, protocol: SlotProtocol) -> None:
        self._context, self._protocol = context, protocol
        self._own: AnyArray | None = None
        self._packed = b""
        self._attached: dict[bytes, AnyArray] = {}
        self._position = 0

    def _mine(self) -> AnyArray:
        if self._own is None:
            own = self._context.store.empty((MARGIN + CHUNKS * CHUNK,), np.uint8)
            handle = self._context.store.handle(own, writable=False)
            if handle is None:
                raise InternalError("the store's own array is not shared")
            self._own, self._packed = own, encode_handle(handle)
        return self._own

    def _chunk(self, memory: AnyArray, position: int, like: AnyArray) -> AnyArray:
        """Return the chunk at `position` as elements of the dtype of `like`."""
        start = MARGIN + position % CHUNKS * CHUNK
        count = CHUNK // like.dtype.itemsize
        return np.ndarray((count,), like.dtype, memory, start)

    def _attach(self, packed: bytes) -> AnyArray:
        """Return another rank's buffers; they stay attached for the epoch."""
        memory = self._attached.get(packed)
        if memory is None:
            memory = self._attached[packed] = self._context.attach(decode_handle(packed), writable=False)
        return memory

    def window(self) -> tuple[AnyArray, bytes]:
        """Return this rank's chunks as bytes, and their handle."""
        memory = self._mine()
        return memory, self._packed

    def window_of(self, packed: bytes) -> AnyArray:
        """Return another rank's chunks as bytes."""
        return self._attach(packed)

    def offset(self, index: int) -> int:
        """Return the first byte of the chunk that is `index` behind the next one."""
        return MARGIN + (self._position + index) % CHUNKS * CHUNK

    def pass_by(self, chunks: int) -> None:
        """Count chunks that all members have used."""
        self._position += chunks

    def offer(self, x: AnyArray, pieces: StagingLayout | None = None) -> bytes:
        """Copy the first chunk of a contiguous `x` in; returns the buffers' handle, for the slot.

        Parameters
        ----------
        pieces : StagingLayout, optional
            Of a reduction: only what others combine is copied.
        """
        if pieces is None:
            self._copy_in(self._mine(), x.reshape(-1), 0, self._position)
        else:
            self._copy_pieces(self._mine(), x.reshape(-1), pieces, 0, self._position)
        return self._packed

    def _copy_in(self, memory: AnyArray, flat: AnyArray, index: int, position: int) -> None:
        count = CHUNK // flat.dtype.itemsize
        part = flat[index * count : (index + 1) * count]
        self._chunk(memory, position, flat)[: part.size] = part
        if fault_injection.ARMED:
            fault_injection.hit("half_payload", self._context.rank)

    def _copy_pieces(
        self, memory: AnyArray, flat: AnyArray, pieces: StagingLayout, index: int, position: int
    ) -> None:
        chunk = self._chunk(memory, position, flat)
        for member in range(len(self._protocol.ranks)):
            if member != self._protocol.index:
                low, high, offset = pieces(index, member)
                chunk[offset : offset + high - low] = flat[low:high]
        if fault_injection.ARMED:
            fault_injection.hit("half_payload", self._context.rank)

    def reduce(
        self,
        x: AnyArray,
        operator: Operator,
        pieces: StagingLayout,
        target: AnyArray | None,
        start: int = 0,
    ) -> None:
        """Combine a contiguous `x` of all members; every member has offered the first chunk.

        Parameters
        ----------
        target : flat array, optional
            Takes as many elements of the result as it has; may be `x`.
        start : int
            The first of them.
        """
        index, size = self._protocol.index, len(self._protocol.ranks)
        memories = [
            self._mine() if i == index else self._attach(bytes(self._protocol.get(i))) for i in range(size)
        ]
        flat = x.reshape(-1)
        for chunk in range(pieces.chunks):
            position = self._position
            parts = [self._chunk(memory, position, flat) for memory in memories]
            low, high, offset = pieces(chunk, index)
            if low < high:
                inputs = [part[offset : offset + high - low] for part in parts]
                out = inputs[index]
                inputs[index] = flat[low:high]
                if not pieces.shown and target is not None:
                    out = target[low - start : high - start]
                with np.errstate(all="ignore"):
                    combine(operator, inputs, out)
            self._position = position + 1
            if chunk + 1 < pieces.chunks:
                self._copy_pieces(memories[index], flat, pieces, chunk + 1, position + 1)
            self._protocol.synchronize()
            if target is None or not pieces.shown:
                continue
            for i in range(size):
                low, high, offset = pieces(chunk, i)
                if low < high:
                    target[low - start : high - start] = parts[i][offset : offset + high - low]

    def offer_prefix(self, x: AnyArray) -> bytes:
        """Begin the scan of a contiguous `x`; returns the buffers' handle, for the slot."""
        memory = self._mine()
        if self._protocol.index == 0:
            flat = x.reshape(-1)
            self._copy_piece(memory, flat[: self._scan_count(flat)], self._position)
        return self._packed

    def scan(self, x: AnyArray, operator: Operator, *, exclusive: bool) -> None:
        """Combine a contiguous `x` in place with those of all lower members; each has offered its own.

        Member i works at piece s - i in step s: it takes what the member below left in step s - 1, and leaves
        the total for the member above, in the place of a piece that this one has read.  So every member reads
        and writes each element twice, however many there are.  The arrival has ended step 0.
        """
        protocol, memory, flat = self._protocol, self._mine(), x.reshape(-1)
        pipeline = Pipeline(self._context, protocol)
        index, last = protocol.index, len(protocol.ranks) - 1
        below = self._attach(bytes(protocol.get(index - 1))) if index else None
        count = self._scan_count(flat)
        pieces = -(-flat.size // count)
        if index > 1:
            pipeline.complete(index - 1)  # there is nothing to do in them
        for piece in range(0 if index else 1, pieces):
            step, mine = index + piece, flat[piece * count : (piece + 1) * count]
            if index < last and piece >= CHUNKS:
                pipeline.wait_for(index + 1, step - 2)  # the piece whose place this one takes
            if below is None:
                self._copy_piece(memory, mine, self._position + step)
            else:
                pipeline.wait_for(index - 1, step - 1)
                total = self._chunk(below, self._position + step - 1, flat)[: mine.size]
                above = self._chunk(memory, self._position + step, flat)[: mine.size]
                _add_piece(operator, total, mine, above if index < last else None, index, exclusive=exclusive)
                if fault_injection.ARMED:
                    fault_injection.hit("half_payload", self._context.rank)
            pipeline.complete(step)
        pipeline.complete(pieces + last - 1)
        if index < last:
            pipeline.wait_for(index + 1, index + pieces)
        self._position += pieces + last

    def _copy_piece(self, memory: AnyArray, piece: AnyArray, position: int) -> None:
        self._chunk(memory, position, piece)[: piece.size] = piece
        if fault_injection.ARMED:
            fault_injection.hit("half_payload", self._context.rank)

    def _scan_count(self, flat: AnyArray) -> int:
        """Return how many elements make a piece: so few that all members soon have one to work at."""
        nbytes = flat.nbytes // (SCAN_PIECES * max(1, len(self._protocol.ranks) - 1))
        return min(max(nbytes, MIN_SCAN_NBYTES), CHUNK) // flat.itemsize

    def broadcast(self, x: AnyArray, root: int, packed: bytes) -> None:
        """Fill a contiguous `x` with what `root` has; the root has offered the first chunk."""
        mine = self._protocol.index == root
        flat = x.reshape(-1)
        count = CHUNK // flat.dtype.itemsize
        chunks = -(-flat.size // count)
        memory = self._mine() if mine else self._attach(packed)
        for index in range(chunks):
            position = self._position
            self._position = position + 1
            if mine:
                if index + 1 < chunks:
                    self._copy_in(memory, flat, index + 1, position + 1)
            else:
                part = flat[index * count : (index + 1) * count]
                part[...] = self._chunk(memory, position, flat)[: part.size]
            if index + 1 < chunks:
                self._protocol.synchronize()

    def close(self) -> None:
        """Release all memory."""
        self._own = None
        self._attached.clear()


def _add_piece(
    operator: Operator,
    total: AnyArray,
    mine: AnyArray,
    above: AnyArray | None,
    members: int,
    *,
    exclusive: bool,
) -> None:
    """Combine a piece with the `total` of so many members below it, and leave the new total `above`."""
    with np.errstate(all="ignore"):
        if exclusive:
            if above is not None:
                operator.ufunc(total, mine, out=above)
            mine[...] = total
        else:
            operator.ufunc(total, mine, out=mine)
            if above is not None:
                above[...] = mine
        finish_array(operator, mine, members if exclusive else members + 1)


_WHERE = struct.Struct("<QQ")
"""Where in a chunk the pieces of an array lie, and their size; the handle of the staging buffers follows."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An array that comes piece by piece."""

    target: AnyArray
    """C-contiguous; filled."""
    where: bytes
    """What its source says of it."""


class StagedCopy:
    """One rank's side of all staged copies in a group."""

    def __init__(self, context: RankContext, protocol: SlotProtocol, staging: StagingBuffers) -> None:
        self._context, self._protocol, self._staging = context, protocol, staging
        self._leaving: list[AnyArray] = []
        self._share = CHUNK

    def offer(self, arrays: Sequence[AnyArray]) -> tuple[list[bytes], int]:
        """Copy the first pieces of C-contiguous arrays in; return where each lies, and how many rounds."""
        self._leaving = [flat_octets(x) for x in arrays]
        self._share = CHUNK // len(arrays) & ~63
        packed = self._staging.window()[1]
        self._copy_in(0)
        rounds = max(-(-data.size // self._share) for data in self._leaving)
        return [_WHERE.pack(i * self._share, self._share) + packed for i in range(len(arrays))], rounds

    def forget(self) -> None:
        """Bring nothing."""
        self._leaving = []

    def _copy_in(self, index: int) -> None:
        memory, _ = self._staging.window()
        begin = self._staging.offset(index)
        first, share = index * self._share, self._share
        for i, data in enumerate(self._leaving):
            piece = data[first : first + share]
            memory[begin + i * share : begin + i * share + piece.size] = piece
        if fault_injection.ARMED:
            fault_injection.hit("half_payload", self._context.rank)

    def run(self, rounds: int, arrivals: Sequence[Arrival]) -> None:
        """Take part in all rounds; every member has offered what it brings."""
        incoming = []
        for arrival in arrivals:
            offset, share = _WHERE.unpack_from(arrival.where)
            memory = self._staging.window_of(arrival.where[_WHERE.size :])
            incoming.append((memory, offset, share, flat_octets(arrival.target)))
        for index in range(rounds):
            if index + 1 < rounds and self._leaving:
                self._copy_in(index + 1)
            begin = self._staging.offset(index)
            for memory, offset, share, data in incoming:
                piece = data[index * share : (index + 1) * share]
                piece[...] = memory[begin + offset : begin + offset + piece.size]
            if fault_injection.ARMED:
                fault_injection.hit("half_payload", self._context.rank)
            if index + 1 < rounds:
                self._protocol.synchronize()
        self._staging.pass_by(rounds)
        self._leaving = []
