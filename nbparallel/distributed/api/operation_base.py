"""Base of the operations: a call's group and deadline, the order of pending calls, a failure's record."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from nbparallel.distributed.arguments import MISSING, check_outputs, deadline
from nbparallel.distributed.collectives.group_collectives import (
    GroupCollectives,
    GroupState,
    GroupTable,
    PendingOperation,
)
from nbparallel.distributed.collectives.movements import Pattern
from nbparallel.distributed.group import Group
from nbparallel.distributed.point_to_point.endpoints import Receiver, Sender
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import in_kind_of
from nbparallel.distributed.work import Tickets, Work, combined_work
from nbparallel.sharing.tensors import is_tensor
from nbparallel.wire.control import Operation

T = TypeVar("T")
GroupLike = Group | None
"""What `group=` takes: None is the world."""
F = TypeVar("F", bound=Callable[..., Any])
Timeout = float | datetime.timedelta | None

PREDEFINED: list[str] = []
"""Operations whose names are defined on every rank, without an import."""
UNTRACED: list[str] = []
"""Operations that the timeline does not show."""


def predefined(operation: F) -> F:
    """Define an operation's name on every rank."""
    PREDEFINED.append(operation.__name__)
    return operation


def untraced(operation: F) -> F:
    """Leave an operation out of the timeline."""
    UNTRACED.append(operation.__name__)
    return operation


class OnOperation(Protocol):
    """An observer of operations, such as the tracer."""

    state: GroupState | None
    """The group of the operation that runs."""


class WorldOperations(Protocol):
    """The collectives of a world or group whose ranks do not all share memory.

    It has methods of the names of `GroupCollectives`, and takes first that of the ranks on this machine.
    """

    def of(self, state: GroupState) -> WorldOperations | None:
        """Return those of a group; None if its ranks share memory."""

    def check(self, name: str, *, async_op: bool, view: bool) -> bool:
        """Return whether the operation of this name is built; raises if it is not in this form."""

    @property
    def average(self) -> Callable[..., None]:
        """As `average` of `data_parallel.gradients`."""

    @property
    def exchange_values(self) -> Callable[..., list[Any]]:
        """As `GroupCollectives.exchange_values`."""

    def close(self) -> None:
        """Release what belongs to it: the cell has ended."""


class OperationBase:
    """The base of a communicator: each family of operations extends it, in a file of its own."""

    rank: int
    world_size: int
    _first: int
    _behind: int
    """The ranks of this machine: from the first up to, without, this one."""
    _context: RankContext
    _world: GroupCollectives
    _sender: Sender
    _receiver: Receiver
    _group_table: GroupTable
    _tickets: Tickets
    _on_operation: OnOperation | None
    _across: WorldOperations | None
    """Operations of the world in a cell on ranks that share no memory; None: all do, or it is not on all."""

    def _operation(
        self,
        name: str,
        group: GroupLike,
        timeout: Timeout = None,
        async_op: bool = False,
        *,
        view: bool = False,
    ) -> OperationCall:
        """Return one call of a collective, with its group and its deadline resolved."""
        deadline_ns = None if timeout is None else deadline(timeout)
        state = self._group_state(group)
        across = self._across and self._across.of(state)
        if across is not None and not across.check(name, async_op=async_op, view=view):
            self._context.place.check_reach(state.ranks, f"{name} that is called")
        if view and async_op:
            raise ValueError("view=True copies nothing and takes no time: leave async_op=True out")
        return OperationCall(self, name, state, deadline_ns, async_op, view, across)

    def _group_state(self, group: GroupLike) -> GroupState:
        """Return the state of a group for a collective that begins now; raises if none can begin."""
        context = self._context
        if group is None:
            if not (context.ready and (context.whole or self._across is not None)):
                context.refuse(world=True)
            return self._group_table.world
        if not context.ready:
            context.refuse(world=False)
        if context.cell.by_item:
            raise context.cell.not_whole(self.world_size)
        return self._group_table.find(group)

    def _run(
        self,
        state: GroupState,
        deadline_ns: int | None,
        call: Callable[..., T],
        *args: Any,
    ) -> T:
        """Run one blocking collective of a group, ``call(collectives, *args, deadline_ns)``.

        Those that are pending in the group are completed first.
        """
        value: T = self._run_step(self._run_in_group, state, deadline_ns, call, args)
        return value

    def _run_in_group(
        self, state: GroupState, deadline_ns: int | None, call: Callable[..., T], args: tuple[Any, ...]
    ) -> T:
        if self._on_operation is not None:
            self._on_operation.state = state
        collectives = state.collectives or self._group_table.open(state, deadline_ns)
        if collectives.pending:
            collectives.pending.flush(deadline_ns=deadline_ns)
        return call(collectives, *args, deadline_ns)

    def _exchange_values(
        self, state: GroupState, operation: Operation, shown: Any, value: Any, deadline_ns: int | None
    ) -> list[Any]:
        """Return the values of all members, as one step of an operation that was called with `shown`."""
        if (across := self._across and self._across.of(state)) is not None:
            return self._run(state, deadline_ns, across.exchange_values, operation, value)
        return self._run(state, deadline_ns, GroupCollectives.exchange_values, operation, shown, value)

    def _run_step(self, call: Callable[..., T], *args: Any) -> T:
        """Run an operation, or one step of it."""
        context = self._context
        if not context.ready:
            context.refuse(world=False)
        context.ready = False
        try:
            value = call(*args)
            context.ready = True
        except BaseException as error:
            context.failed(error)
            raise
        return value

    def _start(
        self,
        state: GroupState,
        name: str,
        operation: str,
        args: Sequence[Any],
        filled: Any = None,
        like: Any = None,
    ) -> Work:
        """Start a nonblocking collective of a group; results are as in `OperationCall.run`."""
        work = Work(f"{name}(async_op=True)", self._context.call_site)

        def start() -> None:
            collectives = state.collectives or self._group_table.open(state, None)
            movement, complete = getattr(collectives.nonblocking, operation)(*args)
            if is_tensor(like):
                compute = complete
                complete = lambda found: in_kind_of(like, compute(found))  # noqa: E731
            pending = PendingOperation(movement, complete, work, filled)
            self._tickets.add(work)
            collectives.pending.add(pending)

        def push(deadline_ns: int | None, wait: bool) -> None:
            collectives = state.collectives
            if collectives is not None:
                engine = collectives.pending
                self._run_step(lambda: engine.flush(work, deadline_ns) if wait else engine.poll(work))

        work.begin(push)
        self._run_step(start)
        self._context.operations += 1
        return work

    def _combine(self, works: Sequence[Work], name: str) -> Work:
        """Return one work for several; its result is the list of theirs."""
        work = combined_work(works, f"{name}(async_op=True)", self._context.call_site)
        self._tickets.add(work)
        return work

    def _message_group(self, group: GroupLike) -> GroupState:
        """Return the state of a group for a message that is sent or received now."""
        if not self._context.ready:
            self._context.refuse(world=False)
        return self._group_table.world if group is None else self._group_table.find(group)


class OperationCall:
    """One call of a collective: its group, its deadline, and whether it blocks."""

    __slots__ = ("_across", "_async_op", "_base", "_deadline_ns", "_name", "_view", "state")

    def __init__(
        self,
        base: OperationBase,
        name: str,
        state: GroupState,
        deadline_ns: int | None,
        async_op: bool,
        view: bool,
        across: WorldOperations | None,
    ) -> None:
        self._base, self._name, self.state, self._deadline_ns = base, name, state, deadline_ns
        self._async_op, self._view, self._across = async_op, view, across

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.state.ranks)

    def root(self, rank: int | None, group_rank: int | None, name: str) -> int:
        """Return the group rank of the root that the caller named; the first member by default."""
        if rank is None and group_rank is None:
            return 0
        return self.state.group_rank(rank, group_rank, name)

    def outputs(self, outputs: Any) -> list[Any]:
        """Return the arrays to fill, one for each member; none for `MISSING`."""
        if outputs is MISSING:
            return []
        if self._view:
            raise ValueError(f"{self._name} with view=True returns views and fills no array")
        return list(check_outputs(outputs, self.size, self._name, "the list of arrays to fill"))

    def move(
        self,
        pattern: Pattern,
        values: Sequence[Any],
        outputs: Sequence[Any] = (),
        root: int | None = None,
        *,
        filled: Any = None,
    ) -> Any:
        """Move values as a pattern says.

        Parameters
        ----------
        filled : object, optional
            What the user passed to be filled: it is returned instead of the outputs.
        """
        return self.run("move", pattern, values, outputs, root, self._view, filled=filled)

    def run(self, operation: str, *args: Any, filled: Any = None, like: Any = None) -> Any:
        """Run the operation of this name, of `GroupCollectives`, `WorldOperations` or nonblocking `Calls`.

        Parameters
        ----------
        filled : object, optional
            What the user passed to be filled: it is returned instead of the result.
        like : object, optional
            If it is a tensor, new arrays return as tensors.
        """
        if self._async_op:
            return self._base._start(self.state, self._name, operation, args, filled, like)
        call = getattr(GroupCollectives if self._across is None else self._across, operation)
        found = self._base._run(self.state, self._deadline_ns, call, *args)
        return in_kind_of(like, found) if filled is None else filled
