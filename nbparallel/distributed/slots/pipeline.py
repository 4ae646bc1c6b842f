"""Pipeline: steps of one collective in which a member waits for the members beside it alone.

The arrival word that all members wait for at the beginning counts the steps of each member as well: when a
member has completed step s, its word is s higher.  At the end all words have grown alike, so that the next
collective counts on from there.

A member may only wait for a step that it could have completed itself, were it to do the other's work: then a
rank that waits has a higher word than those it waits for, and no two can look as if each waited for the other
(`deadlock`, which knows of a collective only the number that is waited for).
"""

from __future__ import annotations

from collections.abc import Sequence

from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.slots.mismatch import left_inside
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.errors import NbParallelError


class Pipeline:
    """One member's side of the steps of a collective that has begun, and at which all have arrived."""

    def __init__(self, context: RankContext, protocol: SlotProtocol) -> None:
        self._context, self._protocol, self._begun = context, protocol, protocol.arrivals

    def complete(self, step: int) -> None:
        """Announce that this member has completed a step, and all before."""
        protocol = self._protocol
        area = protocol.area
        protocol.arrivals = self._begun + step
        self._context.waiter.announce(area.words, area.arrive[area.index], protocol.arrivals)

    def wait_for(self, member: int, step: int) -> None:
        """Wait until a member has completed a step."""
        protocol, waiter = self._protocol, self._context.waiter
        area, rank, target = protocol.area, protocol.ranks[member], self._begun + step
        words, arrive = area.words, area.arrive[member]

        def satisfied() -> bool:
            return words[arrive] >= target

        def explain(finished: Sequence[int]) -> NbParallelError:
            return left_inside(protocol.operation, finished[0])

        if not satisfied() and not waiter.spin(words, arrive, target):
            wait = WaitRecord(
                protocol.operation, lambda: [] if satisfied() else [rank], explain, protocol.line,
                sequence=protocol.number, target=target, deadline_ns=protocol.deadline_ns, area=area.packed,
            )  # fmt: skip
            self._context.wait(satisfied, rank, wait)
        if not waiter.strong_order:
            waiter.fence()  # what the member has written is read after its word
