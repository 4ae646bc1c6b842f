"""Pending slots: collectives that a rank has begun and ends later, in steps of the slot protocol.

A pending collective is an ordinary one whose state is put aside between two steps: what the slot protocol
keeps of the collective that it is in is saved, and restored when all members have arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.slots.fingerprint import Fingerprint
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.wire.control import Operation


@dataclass(slots=True)
class PendingSlot:
    """The state of one collective, to be resumed."""

    number: int
    generation: int
    arrivals: int
    operation: Operation
    fingerprint: Fingerprint
    line: int
    open: int
    """What `RankContext.open` is within it."""
    deadline_ns: int | None


class PendingSlots:
    """One rank's collectives of a group that were begun and not ended."""

    def __init__(self, context: RankContext, protocol: SlotProtocol) -> None:
        self._context, self.protocol = context, protocol

    def has_slot(self) -> bool:
        """Whether `SlotProtocol.begin` would not wait, and there is a slot for another collective."""
        return self.protocol.has_free_slot()

    def arrive(self) -> PendingSlot:
        """Arrive at the collective that has begun, and put it aside."""
        self.protocol.arrive()
        self._context.open = 0
        return self._state()

    def has_arrived(self, pending: PendingSlot) -> bool:
        """Whether every member has arrived at a collective."""
        return not self.protocol.missing(pending.arrivals)

    def is_hopeless(self, pending: PendingSlot) -> bool:
        """Whether a member that has not arrived at a collective has left the cell."""
        context, protocol = self._context, self.protocol
        context.check_peers(protocol.peers)
        return any(map(context.gone, protocol.missing(pending.arrivals)))

    @contextlib.contextmanager
    def resumed(self, pending: PendingSlot) -> Iterator[None]:
        """Within the context, the protocol is in a pending collective, to end it."""
        context, former = self._context, self._state()
        self._restore(pending)
        context.open = pending.number
        context.waiter.fence()  # read the slots only after their arrival counters
        try:
            yield
        finally:
            broken = context.open  # not 0: the collective did not come to its end
            self._restore(former)
            if broken:
                context.open = broken

    def wait_for(self, pending: PendingSlot | None, deadline_ns: int | None) -> None:
        """Wait until every member has arrived at a collective; if None, until there is a free slot."""
        protocol = self.protocol
        if pending is None:
            protocol.deadline_ns = deadline_ns
            protocol.wait_for_readers(protocol.number + 1)
            return
        former = self._state()
        self._restore(pending)
        protocol.deadline_ns = deadline_ns
        try:
            protocol.wait_for_arrivals()
        finally:
            still_open = self._context.open
            self._restore(former)
            self._context.open = still_open

    def _state(self) -> PendingSlot:
        p = self.protocol
        return PendingSlot(
            p.number, p.generation, p.arrivals, p.operation, p.fingerprint, p.line, self._context.open,
            p.deadline_ns,
        )  # fmt: skip

    def _restore(self, state: PendingSlot) -> None:
        p = self.protocol
        p.number, p.generation, p.arrivals = state.number, state.generation, state.arrivals
        p.operation, p.fingerprint, p.line = state.operation, state.fingerprint, state.line
        self._context.open, p.deadline_ns = state.open, state.deadline_ns
