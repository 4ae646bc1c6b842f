"""broadcast: the root writes its bytes, or their handle, into its slot; all other members copy them out.

If all arrays are large and lie in shared memory, every member copies one slice of the root's array to all
others.  Else the root leaves what an exchange would: a large private array in its place, in the buffer that
the root keeps, or as a copy in shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

from nbparallel.distributed.collectives.direct import direct_broadcast
from nbparallel.distributed.collectives.exchange import NOTHING, Exchange, ExchangeRecord, opened, record_of
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.collectives.movements import READ_ONLY, array_label
from nbparallel.distributed.point_to_point.packing import ADOPTED, ARRAY, NUMBER, VIEW, Envelope
from nbparallel.distributed.point_to_point.streaming import flat_octets
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    SharedSpan,
    as_operand,
    as_plain_array,
    read_only,
)
from nbparallel.distributed.slots.fingerprint import (
    DIRECT,
    SHARED,
    Fingerprint,
    Route,
    choose_route,
    fingerprint,
)
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.sharing.tensors import fill_module, is_module, is_tensor
from nbparallel.wire.control import Operation


@functools.lru_cache(maxsize=4096)
def _object_label(rank: int, kind: str) -> Fingerprint:
    return fingerprint("broadcast", kind or "-", root=rank, content="object" if kind else None)


class Broadcast:
    """One rank's side of `broadcast`."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, exchange: Exchange, in_place: InPlaceReading
    ) -> None:
        self._context, self._protocol, self._exchange = context, protocol, exchange
        self._in_place = in_place

    def __call__(self, x: Any, root: int) -> Any:
        """Return the value of `root`; an array of this rank is filled."""
        context, protocol = self._context, self._protocol
        mine = protocol.index == root
        array = as_operand(x) if not mine and is_tensor(x) else as_plain_array(x)
        span = None if array is None else context.memory.span_of(array)
        if array is not None and not mine and not array.flags.writeable:
            raise read_only(x, READ_ONLY)
        if len(protocol.ranks) == 1:
            return x
        left = self._exchange.leave(x) if mine else NOTHING
        label = self._fingerprint(x, array, root, mine=mine)
        protocol.begin(Operation.broadcast, label, context.call_site.line())
        if mine:
            context.nbytes += left.nbytes
            protocol.put(record_of([left], [], [], [], False))
        direct = (
            array is not None and span is not None and span.direct and array.nbytes > protocol.payload_nbytes
        )
        if array is None or span is None or not direct:
            self._arrive_and_compare(0, span, root)
        else:
            if not mine:
                protocol.put(context.memory.packed(array, span))
            with context.exposing():
                offers = self._arrive_and_compare(DIRECT, span, root)
                if choose_route(offers, fits=False) is Route.DIRECT:
                    self._copy_directly(array, root)
                    protocol.release()
                    return x
        value = x if mine else self._take(x, array, root)
        if mine and left.kind not in (ARRAY, NUMBER):
            protocol.wait_until_read()  # until then the other ranks read this rank's memory
        protocol.release()
        if value is not x and array is None and is_module(x):
            return fill_module(x, value)  # behind the operation: one that does not fit fails here alone
        return value

    def _arrive_and_compare(self, bits: int, span: SharedSpan | None, root: int) -> list[int]:
        """Wait for all members; returns their bits, or raises alike on all."""
        protocol = self._protocol
        bits |= SHARED if span is not None else 0
        if not protocol.arrive_and_wait(bits, span):
            protocol.compare(root=root)
        elif not bits:
            return [0] * len(protocol.ranks)  # every member passed a private array
        offers = protocol.bits()
        if any(offers):
            protocol.check_overlap(offers, root=root)
        return offers

    def _copy_directly(self, array: AnyArray, root: int) -> None:
        """Copy this member's slice of the root's array to all other members' arrays."""
        context, protocol = self._context, self._protocol
        source, targets = array, []
        for i in range(len(protocol.ranks)):
            packed = bytes(protocol.get(i))
            if i == root:
                if i != protocol.index:
                    packed = bytes(self._message(root).body)
                    source = context.memory.attach(packed, writable=False)
            elif not protocol.spans.same(protocol.generation, i, root):
                own = i == protocol.index
                targets.append(array if own else context.memory.attach(packed, writable=True))
        direct_broadcast(context, protocol, flat_octets(source), [flat_octets(x) for x in targets])

    def _fingerprint(self, x: Any, array: AnyArray | None, root: int, *, mine: bool) -> Fingerprint:
        """Return the fingerprint; what is moved is left open by ranks that brought no array."""
        rank = self._protocol.ranks[root]
        if array is not None:
            return array_label("broadcast", "-", array.dtype, array.shape, rank)
        return _object_label(rank, type(x).__name__ if mine else "")

    def _message(self, root: int) -> Envelope:
        record = opened(self._protocol.get(root))
        assert isinstance(record, ExchangeRecord), "the root's payload fits into its slot"
        return record.payload(root, self._protocol.index)

    def _take(self, x: Any, array: AnyArray | None, root: int) -> Any:
        """Return the root's value; an array that was passed is filled."""
        protocol, message = self._protocol, self._message(root)
        fetched = list[int]()
        value = self._exchange.take(message, root, array, fetched)
        if fetched:
            self._in_place.confirm(fetched)
        elif array is None and message.kind in (ADOPTED, ARRAY, VIEW):
            self._context.nbytes += value.nbytes
        if message.kind not in (ARRAY, NUMBER):
            self._context.check_peers((protocol.ranks[root],))  # which may be changing it already
            protocol.announce_done()
        return value if array is None else x
