"""Reading in place: large private arrays, read by other ranks where they lie, in one copy.

Else an array is copied into shared memory by its owner and out of it by its readers.  Where the system lets
ranks read each other's memory (`peer_memory`), the owner only says where its array lies.  No rank writes into
another one's memory, so there are no late writers after a failure; but the owner must neither change nor
free the array while others read it, so no member leaves the operation before all have read.

What was read counts only when it is known afterwards that its owner was still inside: a rank that fails says
so before its user gets the array back (`RankContext._leave`), and a process that has ended is seen by its
pidfd.  So a member reads, then looks (`confirm`), and only then meets the others.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterable, Sequence

import numpy as np

from nbparallel.distributed.collectives.direct import MARGIN, combine_parts, slice_bounds
from nbparallel.distributed.operators import Operator
from nbparallel.distributed.point_to_point.streaming import flat_octets
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.errors import NbParallelError, PeerFailedError

LEAST_MOVED = 256 << 10
"""Bytes of the smallest array that is moved in place: for smaller ones the system's look-up of pages costs as
much as a second copy through the cache.  ``python -m benchmarks.operations.tuning``."""
LEAST_COMBINED = 8 << 20
"""Bytes of the smallest array that ranks combine in place: of less, copies stay in the caches.  ``python -m
benchmarks.operations.tuning``."""
BLOCK = 2 << 20
"""Bytes of all other members that are read and combined at a time: they stay in the cache."""
PIECE = 32 << 20
"""Bytes that are only read, between two looks at whether the others are there: some milliseconds."""
CHECK_EVERY = 8
"""Blocks that are combined between two such looks."""
_ADDRESS = struct.Struct("<Q")
_GONE = "in memory some of which is gone or protected (was a mapped file made shorter?)"


def address_in(place: bytes | memoryview) -> int:
    """Return the address that a place is in the memory of its owner; 0: it is in shared memory."""
    return int(_ADDRESS.unpack(place)[0]) if len(place) == _ADDRESS.size else 0


class InPlaceReading:
    """One rank's reading of the other members' private arrays, in one group."""

    def __init__(self, context: RankContext, protocol: SlotProtocol) -> None:
        self._context, self._protocol = context, protocol
        self._memory = context.peers.memory
        self._index, self._size = protocol.index, len(protocol.ranks)
        self._agreed: bool | None = None
        self._rows: list[AnyArray] | None = None

    # -- which rank reads which ------------------------------------------------------------------------

    def offer(self, x: AnyArray, readers: Sequence[int] | None = None) -> bytes:
        """Return where a contiguous private array lies; empty: others cannot read it there.

        By default it is offered to all members, to be combined; else to `readers`, of which each has found
        already that it can read this rank's memory.
        """
        ranks = self._protocol.ranks
        if readers is None:
            if x.nbytes < LEAST_COMBINED or self._agreed is False:
                return b""
        elif x.nbytes < LEAST_MOVED or not self._memory.is_read_by(ranks[i] for i in readers):
            return b""
        address = self._memory.address(x)
        return _ADDRESS.pack(address) if address else b""

    def agreed(self) -> bool:
        """Whether every member can read every other one, to be called when all of them have offered an array.

        In the first operation of a group each tries it, and they meet once more, to know what came of it.
        """
        if self._agreed is None:
            for rank in self._protocol.peers:
                self._memory.verify(rank)
            self._protocol.synchronize()
            self._agreed = self._memory.all_read(self._protocol.ranks)
        return self._agreed

    def try_to_read(self, member: int, nbytes: int) -> None:
        """Find out, for the next operation, whether a member's memory can be read that has sent a copy."""
        if nbytes >= LEAST_MOVED:
            self._memory.verify(self._protocol.ranks[member])

    # -- reading ---------------------------------------------------------------------------------------

    def addresses(self) -> list[int]:
        """Return where every member's array lies, as the slots say."""
        return [_ADDRESS.unpack_from(self._protocol.get(i))[0] for i in range(self._size)]

    def fetch(self, member: int, address: int, target: AnyArray) -> None:
        """Fill a contiguous array with what lies at an address of a member; `confirm` has to follow."""
        octets = flat_octets(target)
        for begin in range(0, octets.size, PIECE):
            if begin:
                self._context.check_peers((self._protocol.ranks[member],))
            self._read([(member, address + begin, octets[begin : begin + PIECE])])
        # fault: half_payload

    def _read(self, blocks: list[tuple[int, int, AnyArray]]) -> None:
        """Fill contiguous arrays, each with the memory at an address of a member."""
        ranks = self._protocol.ranks
        failed = self._memory.read([(ranks[i], address, target) for i, address, target in blocks])
        if failed is not None:
            number, (rank, address, target) = failed
            raise self._failure(rank, number, address, target.nbytes)

    def _failure(self, rank: int, number: int, address: int, nbytes: int) -> OSError:
        """Return the error about memory that was not read; raises that of its owner, if that has failed.

        Only a call that is refused turns reading off; memory that is gone, on either side, is one array's.
        """
        me, memory = self._context.rank, self._memory
        gone = number in (errno.EFAULT, errno.ENOMEM)
        if gone or number == errno.ESRCH:
            # its memory goes with it, and the record comes a moment later
            self._context.await_failure(self._protocol.peers)
            if memory.ended((rank,)) is not None:  # or later still, on a busy machine
                raise self._context.mark_failed(_ended(rank))
        error = os.strerror(number)
        text = f"{error}: rank {me} could not go on reading an array of rank {rank} where it lies"
        if gone:
            if memory.read([(rank, address, np.empty(nbytes, np.uint8))]) is None:
                text = f"{error}: rank {me} could not fill an array with that of rank {rank}"
                return OSError(number, f"{text}: its own is {_GONE}")
            if memory.still_reads(rank):
                return OSError(number, f"{text}: that array is {_GONE}")
        memory.give_up()
        return OSError(
            number,
            f"{text}, which had worked before. From the next cell on arrays are copied instead; `%config "
            "NbParallel.read_in_place = False`, or NBP_READ_IN_PLACE=0 in the environment, does so from the "
            "start",
        )

    def confirm(self, members: Iterable[int] | None = None) -> None:
        """Raise if one of `members`, by default any, has failed: what was read of it may not be its array.

        A member that nothing was read of may have ended: it does not wait for its peers to read.
        """
        ranks, peers = self._protocol.ranks, self._protocol.peers
        sources = peers if members is None else tuple(ranks[i] for i in members)
        if not self._context.waiter.strong_order:
            self._context.waiter.fence()  # the arrays before the words
        self._context.check_peers(sources)
        ended = self._memory.ended(sources)
        if ended is not None:
            self._context.await_failure(self._protocol.peers)
            raise self._context.mark_failed(_ended(ended))

    # -- reductions ------------------------------------------------------------------------------------

    def all_reduce(self, flat: AnyArray, operator: Operator) -> None:
        """Combine a flat array of all members in place.

        Why no member reads what another one has written already:

        1. Member i combines slice i of all arrays and writes the result into slice i of its own.  No other
           member reads that one: member j reads slice j of every array, and nothing else.
        2. They meet, so all have ended this.  Then member i fetches slice j of member j's array, for every
           other j, into slice j of its own.  No other one reads that either: of member i's array they
           read slice i, which is complete, and which member i writes no more.
        3. They meet again, so all have read: a member that returns may change or free its array.
        """
        addresses, size, index = self.addresses(), self._size, self._index
        low, high = slice_bounds(flat.size, index, size)
        self._combine(flat, low, high, flat[low:high], addresses, operator)
        self.confirm()
        self._protocol.synchronize()
        for step in range(1, size):
            member = (index + step) % size
            low, high = slice_bounds(flat.size, member, size)
            if low < high:
                self.fetch(member, addresses[member] + low * flat.itemsize, flat[low:high])
        self.confirm()
        self._protocol.synchronize()

    def reduce_scatter(self, flat: AnyArray, operator: Operator, start: int, target: AnyArray | None) -> None:
        """Combine a part of all members' flat arrays into `target`, which no other member reads."""
        assert target is not None, "every member takes a part"
        self._combine(flat, start, start + target.size, target, self.addresses(), operator)
        self.confirm()
        self._protocol.synchronize()  # all have read

    def _combine(
        self,
        flat: AnyArray,
        low: int,
        high: int,
        target: AnyArray,
        addresses: Sequence[int],
        operator: Operator,
    ) -> None:
        """Combine elements of all members' arrays in rank order into `target`, perhaps that part of `flat`.

        A block at a time: the sum so far and what is added to it stay in the cache.
        """
        size, index, itemsize = self._size, self._index, flat.itemsize
        count = max(1, BLOCK // itemsize // (size - 1))
        rows = self._scratch(count, flat)
        others = [(i, addresses[i]) for i in range(size) if i != index]
        with np.errstate(all="ignore"):  # a warning made an error would leave the others half-way
            for turn, begin in enumerate(range(low, high, count)):
                end = min(begin + count, high)
                parts = [row[: end - begin] for row in rows]
                sums, out = parts[0], target[begin - low : end - low]
                self._read(
                    [(i, at + begin * itemsize, part) for (i, at), part in zip(others, parts, strict=True)]
                )
                parts.insert(index, flat[begin:end])
                combine_parts(operator, parts, out, sums)
                # fault: half_payload if turn == (high - low) // count // 2
                if turn % CHECK_EVERY == CHECK_EVERY - 1:
                    self._context.check_peers(self._protocol.peers)

    def _scratch(self, count: int, like: AnyArray) -> list[AnyArray]:
        """Return a block of this rank's own memory for each other member, which stays."""
        nbytes = count * like.itemsize
        if self._rows is None or self._rows[0].size < nbytes:
            self._rows = _pieces(self._size - 1, nbytes)
        return [np.ndarray((count,), like.dtype, row) for row in self._rows]


def _pieces(number: int, nbytes: int) -> list[AnyArray]:
    """Return pieces of memory, one behind the other, that begin in the middle of a page.

    The system's copies are slow where a program's are (`MARGIN`): to read 16 MB of arrays that begin with a
    page, as mapped files do, took the system two thirds of the time.
    """
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.empty(number * stride + mmap.PAGESIZE, np.uint8)
    begin = (MARGIN - memory.ctypes.data) % mmap.PAGESIZE
    return [memory[start : start + nbytes] for start in range(begin, begin + number * stride, stride)]


def _ended(rank: int) -> NbParallelError:
    return PeerFailedError(f"rank {rank} died: its process ended while its memory was read", rank=rank)
