"""The collectives of one group, as one of its members performs them.

Each algorithm has a file of its own.  They share the slots, the staging buffers and the order: one operation
after the other, the same on every member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbparallel.distributed.collectives.all_reduce import AllReduce
from nbparallel.distributed.collectives.broadcast import Broadcast
from nbparallel.distributed.collectives.exchange import Exchange
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.collectives.movements import Movement, Movements, Pattern
from nbparallel.distributed.collectives.nonblocking import NonblockingCalls, ProgressEngine
from nbparallel.distributed.collectives.reduce import Reduce
from nbparallel.distributed.collectives.staging import StagingBuffers
from nbparallel.distributed.collectives.variants import MaxLoc, Scan
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.slots.fingerprint import Fingerprint, fingerprint
from nbparallel.distributed.slots.pending_slots import PendingSlots
from nbparallel.distributed.slots.slot_area import SlotArea
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.wire.control import Operation

_BARRIER = fingerprint("barrier")
_MONITORED_BARRIER = fingerprint("monitored_barrier")


class GroupCollectives:
    """The collective operations of one rank in one group.

    Roots are group ranks, not ranks of the world.
    """

    def __init__(self, context: RankContext, area: SlotArea) -> None:
        self._context, self._area = context, area
        self.protocol = SlotProtocol(context, area)
        pending_slots = PendingSlots(context, self.protocol)
        self.staging = StagingBuffers(context, self.protocol)
        self.in_place = InPlaceReading(context, self.protocol)
        self.all_reduce = AllReduce(context, self.protocol, self.staging, self.in_place)
        self._scans = [
            Scan(context, self.protocol, self.staging, exclusive=exclusive) for exclusive in (False, True)
        ]
        self._locating = {
            operation: MaxLoc(context, self.protocol, self.staging, self.in_place, operation)
            for operation in (Operation.maxloc, Operation.minloc)
        }
        self._broadcast = Broadcast(context, self.protocol, self.staging, self.in_place)
        self._reduce = Reduce(context, self.protocol, self.staging, self.in_place)
        self._exchange = Exchange(context, pending_slots, self.staging, self.in_place)
        self._movements = Movements(area.ranks, area.index)
        self.nonblocking = NonblockingCalls(area.ranks, area.index)
        self.pending = ProgressEngine(pending_slots, self._exchange, self._changed)

    def _changed(self) -> None:
        """Disable the fast paths of the world while one of its collectives is pending."""
        if self._area.is_world:
            self._context.plain = self._context.whole and not self.pending

    def barrier(
        self,
        deadline_ns: int | None,
        operation: Operation = Operation.barrier,
        label: Fingerprint = _BARRIER,
    ) -> None:
        """Block until every member has called it."""
        protocol = self.protocol
        protocol.deadline_ns = deadline_ns
        protocol.begin(operation, label, self._context.call_site.line())
        if not protocol.arrive_and_wait():
            protocol.compare()
        protocol.release()
        self._context.operations += 1

    def monitored_barrier(self, deadline_ns: int | None) -> None:
        """Do the same, under the name that the user called."""
        self.barrier(deadline_ns, Operation.monitored_barrier, _MONITORED_BARRIER)

    def broadcast(self, x: Any, root: int, deadline_ns: int | None) -> Any:
        """Return the value of `root`; an array that was passed is filled."""
        self.protocol.deadline_ns = deadline_ns
        self._context.operations += 1
        return self._broadcast(x, root)

    def run_all_reduce(self, x: Any, op: str, deadline_ns: int | None) -> Any:
        """Return the combination of all values; an array in place."""
        return self.all_reduce.run(x, op, deadline_ns)

    def scan(self, x: Any, op: str, deadline_ns: int | None) -> Any:
        """Return the combination of the values of the members up to this one; an array in place."""
        return self._scans[False].run(x, op, deadline_ns)

    def exscan(self, x: Any, op: str, deadline_ns: int | None) -> Any:
        """Return the combination of the values of the members before this one; an array in place."""
        return self._scans[True].run(x, op, deadline_ns)

    def locate(self, operation: Operation, pairs: Any, deadline_ns: int | None) -> tuple[Any, Any]:
        """Return the best values of all members and their locations."""
        return self._locating[operation].locate(pairs, deadline_ns)

    def reduce(self, x: Any, root: int, op: str, deadline_ns: int | None) -> Any:
        """Return the combination of all values on `root`; None elsewhere."""
        return self._reduce.reduce(x, root, op, deadline_ns)

    def reduce_scatter(
        self,
        parts: Sequence[Any],
        whole: AnyArray | None,
        op: str,
        output: AnyArray | None,
        deadline_ns: int | None,
    ) -> Any:
        """Return this member's part of the combination of all values; see `Reduce.reduce_scatter`."""
        return self._reduce.reduce_scatter(parts, whole, op, output, deadline_ns)

    def move(
        self,
        pattern: Pattern,
        values: Sequence[Any],
        outputs: Sequence[AnyArray],
        root: int | None,
        view: bool,
        deadline_ns: int | None,
    ) -> Any:
        """Move values as a pattern says; returns what came from the sources."""
        movement = self._movements(pattern, values, outputs, root, view)
        return movement.result(self._exchange(movement, deadline_ns))

    def exchange_values(
        self, operation: Operation, shown: Any, value: Any, deadline_ns: int | None
    ) -> list[Any]:
        """Return the values of all members, as one step of an `operation` that was called with `shown`."""
        return self._exchange(self._movements.step(operation, shown, value), deadline_ns)

    def meet(
        self, operation: Operation, label: Fingerprint, value: Any, deadline_ns: int | None
    ) -> list[Any]:
        """Return the values of all members, as one step of an `operation` with this fingerprint."""
        everyone = range(len(self._area.ranks))
        return self._exchange(Movement(operation, label, (value,), everyone, {}), deadline_ns)

    def begin_cell(self) -> None:
        """Count calls anew, for messages."""
        self.protocol.calls.begin_cell(self.protocol.number)

    def release(self) -> None:
        """Release copies that all members have read."""
        self._exchange.release()

    def release_staging(self) -> None:
        """Release the staging buffers, unless a member may read them; the next use makes others."""
        if self.protocol.all_done() >= self.protocol.number:
            self.staging.close()
            self.in_place.close()

    def close(self) -> None:
        """Release all memory."""
        self.staging.close()
        self.in_place.close()
        self._exchange.close()
        for reduction in (self.all_reduce, *self._scans, *self._locating.values()):
            reduction.close()
        self.protocol.close()
        self._area.close()
