"""Calling: what every operation does before it begins and when it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from nbparallel.distributed.collectives.collectives import GroupCollectives
from nbparallel.distributed.collectives.nonblocking import PendingOperation
from nbparallel.distributed.deferring import Deferring, Plan
from nbparallel.distributed.group import Group, GroupState, GroupTable
from nbparallel.distributed.point_to_point.receiver import Receiver
from nbparallel.distributed.point_to_point.sender import Sender
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.work import Tickets, Work

if TYPE_CHECKING:
    from nbparallel.distributed.tracing import OperationTracer

T = TypeVar("T")
GroupLike = Group | None
"""What `group=` takes: None is the world."""


class OperationBase:
    """The base of a communicator: the families of operations stand on it, each in a file of its own."""

    rank: int
    world_size: int
    _context: RankContext
    _world: GroupCollectives
    _sender: Sender
    _receiver: Receiver
    _group_table: GroupTable
    _tickets: Tickets
    _tracer: OperationTracer | None

    def _group_state(self, group: GroupLike) -> GroupState:
        """Return the team for a collective that begins now; raises why none can."""
        context = self._context
        if group is None:
            if not (context.ready and context.whole):
                context.refuse(world=True)
            return self._group_table.world
        if not context.ready:
            context.refuse(world=False)
        return self._group_table.find(group)

    def _run(self, state: GroupState, deadline_ns: int | None, call: Callable[[GroupCollectives], T]) -> T:
        """Run one collective of a team."""
        context = self._context
        context.ready = False
        if self._tracer is not None:
            self._tracer.state = state
        try:
            collectives = state.collectives or self._group_table.open(state, deadline_ns)
            if collectives.begun:
                collectives.begun.flush(deadline_ns=deadline_ns)
            value = call(collectives)
            context.ready = True
        except BaseException as error:
            context.failed(error)
            raise
        return value

    def _talk(self, call: Callable[[], T]) -> T:
        """Run one step of an operation that needs no team."""
        context = self._context
        if not context.ready:
            context.refuse(world=False)
        context.ready = False
        try:
            value = call()
            context.ready = True
        except BaseException as error:
            context.failed(error)
            raise
        return value

    def _begin(
        self, state: GroupState, name: str, describe: Callable[[Deferring], Plan], filled: Any = None
    ) -> Work:
        """Begin one collective of a team, to be finished later; `filled` is what it returns then."""
        work = Work(f"{name}(async_op=True)", self._context.call_site.line())

        def start() -> None:
            collectives = state.collectives or self._group_table.open(state, None)
            movement, complete = describe(collectives.later)

            def finish(found: Any) -> Any:
                value = complete(found)
                return value if filled is None else filled

            pending = PendingOperation(movement, finish, work)
            self._tickets.add(work)
            collectives.begun.add(pending)

        def push(deadline_ns: int | None, wait: bool) -> None:
            collectives = state.collectives
            if collectives is not None:
                begun = collectives.begun
                self._talk(lambda: begun.flush(work, deadline_ns) if wait else begun.look(work))

        work.begin(push)
        self._talk(start)
        return work

    def _of_two(self, group: GroupLike) -> GroupState:
        """Return the team for a message that is sent or received now."""
        if not self._context.ready:
            self._context.refuse(world=False)
        return self._group_table.world if group is None else self._group_table.find(group)
