"""Collectives: everything that one group does together, as one of its members does it.

Each operation has a file of its own; they share how the members meet (`meeting`), the scratch memory, and
the order: one operation after the other, the same on every member.
"""

from __future__ import annotations

from typing import Any

from nbparallel.distributed.collectives.all_reduce import AllReduce
from nbparallel.distributed.collectives.broadcast import Broadcast
from nbparallel.distributed.collectives.exchange import Exchange
from nbparallel.distributed.collectives.movements import Gathering
from nbparallel.distributed.collectives.nonblocking import ProgressEngine
from nbparallel.distributed.collectives.reduce import Reduce
from nbparallel.distributed.collectives.staging import StagingBuffers
from nbparallel.distributed.deferring import Deferring
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.scattering import Scattering
from nbparallel.distributed.slots.fingerprint import fingerprint
from nbparallel.distributed.slots.pending_slots import PendingSlots
from nbparallel.distributed.slots.slot_area import SlotArea
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.wire.control import Operation

_BARRIER = fingerprint("barrier")


class GroupCollectives:
    """The collective operations of one rank in one group.

    Roots are places in the group, not ranks of the world.
    """

    def __init__(self, context: RankContext, area: SlotArea) -> None:
        self._context, self._area = context, area
        self.protocol = SlotProtocol(context, area)
        pending_slots = PendingSlots(context, self.protocol)
        self._staging = StagingBuffers(context, self.protocol)
        self.all_reduce = AllReduce(context, self.protocol, self._staging)
        self._broadcast = Broadcast(context, self.protocol, self._staging)
        reducing = Reduce(context, self.protocol, self._staging)
        self.reduce, self.reduce_scatter = reducing.reduce, reducing.reduce_scatter
        self._exchange = Exchange(context, pending_slots, self._staging)
        gathering = Gathering(self._exchange, area.ranks, area.index)
        self.all_gather, self.gather, self.tell = gathering.all_gather, gathering.gather, gathering.tell
        self.later = Deferring(area.ranks, area.index)
        self.begun = ProgressEngine(pending_slots, self._exchange, self._changed)
        self._scattering = Scattering(self._exchange, area.ranks)
        self.scatter, self.all_to_all = self._scattering.scatter, self._scattering.all_to_all

    def _changed(self) -> None:
        """Let the quick ways of the world be taken only while nothing that was begun there is under way."""
        if self._area.is_world:
            self._context.plain = self._context.whole and not self.begun

    def barrier(self, deadline_ns: int | None) -> None:
        """Wait until every member is here."""
        protocol = self.protocol
        protocol.deadline_ns = deadline_ns
        protocol.begin(Operation.barrier, _BARRIER, self._context.call_site.line())
        if not protocol.arrive_and_wait():
            protocol.compare()
        protocol.release()
        self._context.operations += 1

    def broadcast(self, x: Any, root: int, deadline_ns: int | None, *, view: bool = False) -> Any:
        """Give everybody what `root` has."""
        if view:
            return self._scattering.show(x, root, deadline_ns, mine=self._area.index == root)
        self.protocol.deadline_ns = deadline_ns
        self._context.operations += 1
        return self._broadcast(x, root)

    def release(self) -> None:
        """Let go of copies that everybody has read."""
        self._exchange.release()

    def close(self) -> None:
        """Let go of all memory."""
        self._staging.close()
        self._exchange.close()
        self.all_reduce.close()
        self.protocol.close()
        self._area.close()
