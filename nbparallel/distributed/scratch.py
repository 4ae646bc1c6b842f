"""Private arrays through scratch memory: every rank has three chunks in one shared array of its own.

The chunks are used in turn, over all operations of an epoch.  One synchronisation a chunk is enough: a rank
that fills chunk q + 1 has passed the synchronisation of chunk q - 1, before which everybody had read out
chunk q - 2, and that is the one whose place it takes.  Nobody writes into another rank's scratch, so a
failure leaves no late writers.
"""

from __future__ import annotations

import numpy as np

from nbparallel.distributed import faultpoints
from nbparallel.distributed.direct import slice_bounds
from nbparallel.distributed.meeting import Meeting
from nbparallel.distributed.member import Member
from nbparallel.distributed.memory import AnyArray, decode_handle, encode_handle
from nbparallel.distributed.reduce import Operator
from nbparallel.errors import InternalError

CHUNK = 1 << 20
"""Bytes: stays in a core's second-level cache, and is large against a synchronisation."""
CHUNKS = 3


class Scratch:
    """One rank's scratch memory and the others' as attached here; all are made on first use."""

    def __init__(self, member: Member, meeting: Meeting) -> None:
        self._member, self._meeting = member, meeting
        self._own: AnyArray | None = None
        self._packed = b""
        self._attached: dict[bytes, AnyArray] = {}
        self._position = 0
        self._sum: AnyArray | None = None

    def _mine(self) -> AnyArray:
        if self._own is None:
            own = self._member.store.empty((CHUNKS * CHUNK,), np.uint8)
            handle = self._member.store.handle(own, writable=False)
            if handle is None:
                raise InternalError("the store's own array is not shared")
            self._own, self._packed = own, encode_handle(handle)
        return self._own

    def _chunk(self, memory: AnyArray, position: int, like: AnyArray) -> AnyArray:
        """Return the chunk at `position` as elements of the dtype of `like`."""
        start = position % CHUNKS * CHUNK
        count = CHUNK // like.dtype.itemsize
        return np.ndarray((count,), like.dtype, memory, start)

    def _attach(self, packed: bytes) -> AnyArray:
        """Return another rank's scratch; it stays attached for the epoch."""
        memory = self._attached.get(packed)
        if memory is None:
            memory = self._attached[packed] = self._member.attach(decode_handle(packed), writable=False)
        return memory

    def offer(self, x: AnyArray) -> bytes:
        """Copy the first chunk of a contiguous `x` in; returns the scratch's handle, for the slot."""
        self._copy_in(self._mine(), x.reshape(-1), 0, self._position)
        return self._packed

    def _copy_in(self, memory: AnyArray, flat: AnyArray, index: int, position: int) -> None:
        count = CHUNK // flat.dtype.itemsize
        part = flat[index * count : (index + 1) * count]
        self._chunk(memory, position, flat)[: part.size] = part
        if faultpoints.ARMED:
            faultpoints.hit("half_payload", self._member.rank)

    def reduce(
        self, x: AnyArray, operator: Operator, target: AnyArray | None, start: int = 0, *, averaged: bool
    ) -> None:
        """Combine a contiguous `x` of all members; everybody has offered the first chunk.

        Parameters
        ----------
        target : flat array, optional
            Takes as many elements of the result as it has; may be `x`.
        start : int
            The first of them.
        """
        index, size = self._meeting.index, len(self._meeting.ranks)
        memories = [
            self._mine() if i == index else self._attach(bytes(self._meeting.get(i))) for i in range(size)
        ]
        flat = x.reshape(-1)
        count = CHUNK // flat.dtype.itemsize
        chunks = -(-flat.size // count)
        for chunk in range(chunks):
            position = self._position
            parts = [self._chunk(memory, position, flat) for memory in memories]
            begin = chunk * count
            length = min(count, flat.size - begin)
            low, high = slice_bounds(length, index, size)
            if low < high:
                with np.errstate(all="ignore"):
                    self._combine(parts, low, high, operator, averaged=averaged)
            self._position = position + 1
            if chunk + 1 < chunks:
                self._copy_in(memories[index], flat, chunk + 1, position + 1)
            self._meeting.again()
            if target is None:
                continue
            for i in range(size):
                low, high = slice_bounds(length, i, size)
                low, high = max(low, start - begin), min(high, start + target.size - begin)
                if low < high:
                    target[begin + low - start : begin + high - start] = parts[i][low:high]

    def _combine(
        self, parts: list[AnyArray], start: int, stop: int, operator: Operator, *, averaged: bool
    ) -> None:
        """Combine one slice in rank order into this rank's own chunk, which nobody else reads there."""
        index, ufunc = self._meeting.index, operator.ufunc
        slices = [part[start:stop] for part in parts]
        mine = slices[index]
        total = slices[0]
        for i, other in enumerate(slices[1:], 1):
            # This rank's own values are read when their turn comes; from then on their place takes the sum.
            out = mine if i >= index else self._partial(mine)
            total = ufunc(total, other, out=out)
        if averaged:
            np.true_divide(mine, len(parts), mine)

    def _partial(self, like: AnyArray) -> AnyArray:
        """Return memory for a sum that cannot lie in the chunk yet."""
        if self._sum is None:
            self._sum = np.empty(CHUNK, np.uint8)
        return np.ndarray(like.shape, like.dtype, self._sum)

    def broadcast(self, x: AnyArray, root: int, packed: bytes) -> None:
        """Fill a contiguous `x` with what `root` has; the root has offered the first chunk."""
        mine = self._meeting.index == root
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
                self._meeting.again()

    def close(self) -> None:
        """Let go of everything."""
        self._own = self._sum = None
        self._attached.clear()
