"""Numbers of all members through the slots: the quickest way from everybody to everybody."""

from __future__ import annotations

from typing import Any

from nbparallel.distributed.operators import pack_number, unpack_number
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.slots.fingerprint import Fingerprint
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.wire.control import Operation


def exchange_numbers(
    context: RankContext, protocol: SlotProtocol, operation: Operation, label: Fingerprint, value: Any
) -> list[Any]:
    """Return every member's value; it is a number, or anything else that is short."""
    packed = pack_number(value)
    if len(packed) > protocol.payload_nbytes:
        raise ValueError(f"a number of {len(packed)} bytes is too long for {operation.name}")
    protocol.begin(operation, label, context.call_site.line())
    protocol.put(packed)
    if not protocol.arrive_and_wait():
        protocol.compare()
    values = [unpack_number(bytes(protocol.get(i))) for i in range(len(protocol.ranks))]
    protocol.release()
    context.operations += 1
    return values
