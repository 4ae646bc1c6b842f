"""Collectives: everything that one group does together, as one of its members does it.

Each operation has a file of its own; they share how the members meet (`meeting`), the scratch memory, and
the order: one operation after the other, the same on every member.
"""

from __future__ import annotations

from typing import Any

from nbparallel.distributed.averaging import Averaging
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
from nbparallel.wire.control import Operation

_BARRIER = fingerprint("barrier")


class GroupCollectives:
    """The collective operations of one rank in one group.

    Roots are places in the group, not ranks of the world.
    """

    def __init__(self, member: RankContext, area: SlotArea) -> None:
        self._member, self._area = member, area
        self.meeting = PendingSlots(member, area)
        self._scratch = StagingBuffers(member, self.meeting)
        self.all_reduce = AllReduce(member, self.meeting, self._scratch)
        self._broadcast = Broadcast(member, self.meeting, self._scratch)
        reducing = Reduce(member, self.meeting, self._scratch)
        self.reduce, self.reduce_scatter = reducing.reduce, reducing.reduce_scatter
        self._exchange = Exchange(member, self.meeting, self._scratch)
        gathering = Gathering(self._exchange, area.ranks, area.index)
        self.all_gather, self.gather, self.tell = gathering.all_gather, gathering.gather, gathering.tell
        self.averaging = Averaging(member, self.meeting, self.all_reduce, gathering)
        self.later = Deferring(area.ranks, area.index)
        self.begun = ProgressEngine(self.meeting, self._exchange, self._changed)
        self._scattering = Scattering(self._exchange, area.ranks)
        self.scatter, self.all_to_all = self._scattering.scatter, self._scattering.all_to_all

    def _changed(self) -> None:
        """Let the quick ways of the world be taken only while nothing that was begun there is under way."""
        if self._area.is_world:
            self._member.plain = self._member.whole and not self.begun

    def barrier(self, deadline_ns: int | None) -> None:
        """Wait until every member is here."""
        meeting = self.meeting
        meeting.deadline_ns = deadline_ns
        meeting.begin(Operation.barrier, _BARRIER, self._member.calling.line())
        if not meeting.meet():
            meeting.compare()
        meeting.end()
        self._member.operations += 1

    def broadcast(self, x: Any, root: int, deadline_ns: int | None, *, view: bool = False) -> Any:
        """Give everybody what `root` has."""
        if view:
            return self._scattering.show(x, root, deadline_ns, mine=self._area.index == root)
        self.meeting.deadline_ns = deadline_ns
        self._member.operations += 1
        return self._broadcast(x, root)

    def release(self) -> None:
        """Let go of copies that everybody has read."""
        self._exchange.release()

    def close(self) -> None:
        """Let go of all memory."""
        self._scratch.close()
        self._exchange.close()
        self.all_reduce.close()
        self.meeting.close()
        self._area.close()
