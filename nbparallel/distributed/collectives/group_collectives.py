"""The collectives of one group, as one of its members performs them.

Each algorithm has a file of its own.  They share the slots, a buffer and the order: one operation after the
other, the same on every member.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.arguments import check_group_rank, check_rank
from nbparallel.distributed.collectives.direct import KeptBuffer
from nbparallel.distributed.collectives.exchange import Broadcast, Exchange
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.collectives.movements import Calls, Movement, checked_parts
from nbparallel.distributed.collectives.reduce import Reduce
from nbparallel.distributed.group import Group
from nbparallel.distributed.point_to_point.endpoints import Receiver, Sender
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    as_operand,
    copied,
    decode_handle,
    packed_handle,
)
from nbparallel.distributed.slots.slot_area import (
    Fingerprint,
    SlotArea,
    fingerprint,
    group_area,
    group_nbytes,
    prepare,
)
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.distributed.work import Work
from nbparallel.errors import ProtocolError, rank_list
from nbparallel.sharing.store import Store
from nbparallel.wire.control import Operation

_BARRIER = fingerprint("barrier")
_MONITORED_BARRIER = fingerprint("monitored_barrier")


# Nonblocking collectives: what ``async_op=True`` starts, and how it makes progress.
#
# A collective is *posted* when its record lies in a slot and its rank has arrived; it is *complete* when all
# members have arrived, and this rank has read their records.  Neither step blocks.  A collective that finds
# no free slot is posted later.  Another collective of the same group first completes all that are pending:
# every member must reach those first, so this adds no wait that could not end.
#
# Every nonblocking collective is one exchange of records: a reduction moves all values, and each member
# combines them itself.


@dataclass(slots=True)
class PendingOperation:
    """One collective that has begun and is not complete."""

    movement: Movement
    complete: Callable[[list[Any]], Any]
    """Returns the operation's result, from what came from each source."""
    work: Work
    filled: Any = None
    """What the user passed to be filled: it is the result instead, unless None."""
    values: Sequence[Any] = ()
    """Copies of its values: what this member takes itself."""
    record: bytes = b""
    keepalive: object = None
    """What the record refers to, to be held until it was read."""
    state: dict[str, Any] | None = None
    """Of the slot protocol when it was posted; None until there is a slot for it."""


class ProgressEngine:
    """The pending collectives of one group on this rank.

    A pending collective is an ordinary one whose state is put aside between two steps: what the slot protocol
    keeps of the collective that it is in is saved, and restored when all members have arrived.
    """

    def __init__(
        self,
        context: RankContext,
        protocol: SlotProtocol,
        exchange: Exchange,
    ) -> None:
        self._context, self._protocol, self._exchange = context, protocol, exchange
        self._queue: deque[PendingOperation] = deque()
        self._busy = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, pending: PendingOperation) -> None:
        """Begin a collective; its values are copied now, even if there is no slot yet."""
        pending.values = [copied(x) for x in pending.movement.values]
        pending.record, pending.keepalive, _ = self._exchange.write(pending.movement, pending.values)
        self._queue.append(pending)
        self._changed()
        self.advance()

    def _changed(self) -> None:
        """Disable the fast paths of the world while one of its collectives is pending."""
        if self._protocol.area.is_world:
            self._context.plain = self._context.whole and not self._queue

    def advance(self) -> None:
        """Post and complete collectives as far as possible, without blocking."""
        if self._busy or not self._queue:
            return
        self._busy = True
        try:
            while self._queue:
                for pending in self._queue:
                    if pending.state is None and not self._protocol.has_free_slot():
                        break
                    if pending.state is None:
                        self._post(pending)
                first = self._queue[0]
                if first.state is None or self._protocol.missing(first.state["arrivals"]):
                    return
                self._finish(first, first.state)
        finally:
            self._busy = False

    def _post(self, pending: PendingOperation) -> None:
        """Write a record and arrive; there is a free slot."""
        context, protocol, movement = self._context, self._protocol, pending.movement
        outer = context.open  # posted while another operation waits: that one is still open afterwards
        protocol.begin(movement.operation, movement.fingerprint, pending.work.line)
        self._exchange.hold(pending.keepalive)
        protocol.put(pending.record)
        protocol.arrive()
        pending.state = protocol.state()
        context.open = outer

    @contextlib.contextmanager
    def _resumed(self, state: dict[str, Any]) -> Iterator[None]:
        """Within the context, the protocol is in a pending collective."""
        former = self._protocol.state()
        self._protocol.restore(state)
        try:
            yield
        finally:
            self._protocol.restore(former)

    def _finish(self, pending: PendingOperation, state: dict[str, Any]) -> None:
        """Complete a collective; an error of this call alone is raised by its `Work.wait`."""
        context, protocol, work = self._context, self._protocol, pending.work
        outer, context.open = context.open, state["number"]
        try:
            with self._resumed(state):
                context.waiter.fence()  # read the slots only after their arrival counters
                protocol.compare()
                _, found = self._exchange.read(pending.movement, pending.values)
                protocol.release(wake=True)
        except ValueError as error:  # overlapping memory: all members ended it, before any array was written
            work.fail(error)
        except BaseException as error:
            work.fail(error)
            raise
        else:
            try:
                value = pending.complete(found)
                work.finish(value if pending.filled is None else pending.filled)
            except Exception as error:  # noqa: BLE001 - the values of other members can raise anything when combined
                work.fail(error)
        finally:
            context.open = context.open or outer  # not 0: the collective did not come to its end
            self._queue.popleft()
            self._changed()

    def flush(self, work: Work | None = None, deadline_ns: int | None = None) -> None:
        """Block until `work` is complete, or all pending collectives."""
        while self._queue and (work is None or not work.done):
            self.advance()
            if self._queue and (work is None or not work.done):
                self._busy = True  # the wait has changed the protocol: nothing may be posted until it ends
                try:
                    self._wait_for(self._queue[0].state, deadline_ns)
                finally:
                    self._busy = False

    def _wait_for(self, state: dict[str, Any] | None, deadline_ns: int | None) -> None:
        """Wait until every member has arrived at a collective; if None, until there is a free slot."""
        protocol = self._protocol
        if state is None:
            protocol.deadline_ns = deadline_ns
            protocol.wait_for_readers(protocol.number + 1)
            return
        with self._resumed(state):
            protocol.deadline_ns = deadline_ns
            protocol.wait_for_arrivals()

    def poll(self, work: Work) -> None:
        """Advance without blocking; raises if `work` can never complete, so that no rank polls forever."""
        self.advance()
        state = self._queue[0].state if self._queue and not work.done else None
        if state is not None:
            self._context.check_peers(self._protocol.peers)
            if any(map(self._context.gone, self._protocol.missing(state["arrivals"]))):
                self.flush(work)

    def drop(self) -> None:
        """Drop all pending collectives at the end of their cell."""
        while self._queue:
            self._queue.popleft().work.drop()
        self._changed()


class GroupCollectives:
    """The collective operations of one rank in one group.

    Roots are group ranks, not ranks of the world.  The last argument of each is its deadline.
    """

    def __init__(self, context: RankContext, area: SlotArea, buffer: KeptBuffer) -> None:
        self._context, self._area = context, area
        protocol = self.protocol = SlotProtocol(context, area)
        self.in_place = in_place = InPlaceReading(context, protocol)
        self.reductions = Reduce(context, protocol, buffer, in_place)
        self.exchange = Exchange(context, protocol, in_place, buffer)
        self._broadcast = Broadcast(context, protocol, self.exchange, in_place)
        self._calls = Calls(area.ranks, area.index)
        self.nonblocking = Calls(area.ranks, area.index, nonblocking=True)
        self.pending = ProgressEngine(context, protocol, self.exchange)

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

    def all_reduce(self, x: Any, op: str, deadline_ns: int | None) -> Any:
        """Return the combination of all values; an array in place."""
        return self.reductions.all_reduce(x, op, deadline_ns)

    def reduce(self, x: Any, root: int, op: str, deadline_ns: int | None) -> Any:
        """Return the combination of all values on `root`; None elsewhere."""
        array = x if type(x) is np.ndarray else as_operand(x)
        if array is None:
            return self._exchanged("reduce", x, root, op, deadline_ns)
        return self.reductions.reduce(x, array, root, op, deadline_ns)

    def reduce_scatter(
        self,
        parts: Sequence[Any],
        whole: AnyArray | None,
        op: str,
        output: AnyArray | None,
        deadline_ns: int | None,
    ) -> Any:
        """Return this member's part of the combination of all values, of the `whole` if that is an array."""
        operator, values = checked_parts(parts, whole, op, output, self._area.index)
        if not isinstance(values[0], np.ndarray):
            return self._exchanged("reduce_scatter", parts, whole, op, output, deadline_ns)
        return self.reductions.reduce_scatter(operator, values, whole, output, deadline_ns)

    def _exchanged(self, name: str, *args: Any) -> Any:
        """Return what a call returns that is one exchange, as its nonblocking form is; numbers are short."""
        *passed, deadline_ns = args
        movement, complete = getattr(self._calls, name)(*passed)
        if isinstance(movement.values[0], np.ndarray):
            return complete(self.exchange(movement, deadline_ns))
        self.protocol.deadline_ns = deadline_ns
        values, place = movement.values, self._area.index if len(movement.values) > 1 else 0
        found = self.reductions.exchange_numbers(movement.operation, movement.fingerprint, values)
        return complete([found[source][place] for source in movement.sources])

    def move(self, *args: Any) -> Any:
        """Move values as a pattern says; returns what came from the sources."""
        *passed, deadline_ns = args
        movement = self._calls.movement(*passed)
        return movement.result(self.exchange(movement, deadline_ns))

    def scan(self, *args: Any) -> Any:
        """Return the combination of the values of the members up to this one; an array in place."""
        return self._scan(Operation.scan, *args)

    def exscan(self, *args: Any) -> Any:
        """Return the combination of the values of the members before this one; an array in place."""
        return self._scan(Operation.exscan, *args)

    def _scan(self, operation: Operation, x: Any, op: str, deadline_ns: int | None) -> Any:
        array = as_operand(x)
        if array is None or not array.flags.writeable or array.nbytes > self.protocol.payload_nbytes:
            return self._exchanged(operation.name, x, op, deadline_ns)
        return x if self.reductions.scan(operation, array, op, deadline_ns) else None

    def locate(self, *args: Any) -> Any:
        """Return the best values of all members and their locations."""
        return self._exchanged("locate", *args)

    def exchange_values(
        self, operation: Operation, shown: Any, value: Any, deadline_ns: int | None
    ) -> list[Any]:
        """Return the values of all members, as one step of an `operation` that was called with `shown`."""
        return self.exchange(self._calls.step(operation, shown, value), deadline_ns)

    def meet(
        self, operation: Operation, label: Fingerprint, value: Any, deadline_ns: int | None
    ) -> list[Any]:
        """Return the values of all members, as one step of an `operation` with this fingerprint."""
        everyone = range(len(self._area.ranks))
        return self.exchange(Movement(operation, label, (value,), everyone, {}), deadline_ns)

    def close(self) -> None:
        """Release all memory."""
        self.exchange.close()
        self.reductions.close()
        self.protocol.close()
        self._area.close()


# The state of the groups that a rank knows: member numbers, slot areas and pending collectives, per epoch.
#
# The members of a group communicate through a slot area of their own.  The first member allocates it in its
# first operation in the group and sends the handle to the others; they block in an ordinary receive, in which
# deadlocks are detected as in any other.

LARGEST_NBYTES = 32 << 20
"""Of a segment for groups."""


class AreaMemory:
    """Memory for the areas of all groups that one rank opens, in few segments.

    Each new segment is as large as all before it together: their number grows as the logarithm of the number
    of groups.  Areas are freed together, at the end of the epoch: a group is a value, which any member may
    use again at any time.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._block: AnyArray = np.empty(0, np.uint8)
        self._used = self._made = 0

    def allocate(self, ranks: tuple[int, ...]) -> AnyArray:
        """Return the memory of a group's area, prepared."""
        nbytes = group_nbytes(len(ranks))
        if self._used + nbytes > self._block.size:
            size = max(nbytes, min(self._made, LARGEST_NBYTES))
            self._block, self._used = self._store.empty((size,), np.uint8), 0
            self._made += size
        memory = self._block[self._used : self._used + nbytes]
        self._used += nbytes
        prepare(memory, ranks)
        return memory


class GroupState:
    """One rank's state of one group: its number there, and the collectives of the group."""

    __slots__ = ("cell", "collectives", "group", "index", "ranks", "word")

    def __init__(self, group: Group, index: int, collectives: GroupCollectives | None = None) -> None:
        self.group, self.ranks, self.index = group, group.ranks, index
        self.collectives = collectives
        """None until the first operation in the group."""
        self.word = 0 if collectives is not None else group.word
        self.cell = 0
        """The last cell in which all members were known to take part."""

    def group_rank(self, rank: Any, group_rank: Any, name: str, default: int | None = None) -> int:
        """Return the member that ``name`` (in the world) or ``group_name`` (in the group) means."""
        if rank is not None and group_rank is not None:
            raise ValueError(f"{name} and group_{name} both name a rank: pass one of them")
        if group_rank is not None:
            return check_group_rank(group_rank, f"group_{name}", self.ranks)
        if rank is None:
            if default is None:
                raise TypeError(
                    f"{name} is missing: the rank to communicate with; dist.PROC_NULL if there is none, as "
                    "beyond the edge of a grid"
                )
            rank = default
        return check_rank(rank, name, self.ranks, world=self.word == 0)


class GroupTable:
    """The groups that one rank knows in one epoch."""

    def __init__(
        self,
        context: RankContext,
        sender: Sender,
        receiver: Receiver,
        world: GroupCollectives,
        buffer: KeptBuffer,
    ) -> None:
        self._context, self._sender, self._receiver = context, sender, receiver
        all_ranks = Group(tuple(range(context.world_size)))
        self.world = GroupState(all_ranks, context.rank, world)
        self._known = {all_ranks: self.world}
        self._memory, self._buffer = AreaMemory(context.store), buffer

    def find(self, group: object) -> GroupState:
        """Return the state of a group, for an operation that begins now.

        Raises
        ------
        TypeError
            `group` is not a `Group`.
        ValueError
            This rank is not a member, or a member does not run this cell.
        """
        state = self._known.get(group) if isinstance(group, Group) else None
        if state is None:
            state = self.know(group)
        context = self._context
        if state.index < 0:
            raise ValueError(
                f"rank {context.rank} is not in {state.group}, and cannot take part in its operations"
            )
        if state.cell != context.cell.number:
            missing = [r for r in state.ranks if r not in context.cell.ranks]
            if missing and context.cell.number:
                context.place.check_reach(missing, f"an operation of {state.group} that is called")
                verb = "is" if len(missing) == 1 else "are"
                raise ValueError(
                    f"{rank_list(missing)} {verb} not in this cell, and an operation of {state.group} needs "
                    "all its ranks"
                )
            state.cell = context.cell.number
        return state

    def know(self, group: object) -> GroupState:
        """Return the state of a group, also of one without this rank."""
        if not isinstance(group, Group):
            raise TypeError(
                f"group must be what new_group returned, or None for all, not {type(group).__name__}"
            )
        state = self._known.get(group)
        if state is None:
            rank, ranks = self._context.rank, group.ranks
            if max(ranks) >= self._context.world_size:
                raise ValueError(
                    f"{group} was made for a larger world: there are {self._context.world_size} ranks"
                )
            state = self._known[group] = GroupState(group, ranks.index(rank) if rank in ranks else -1)
        return state

    def open(self, state: GroupState, deadline_ns: int | None) -> GroupCollectives:
        """Return the group's collectives; the first call sets up the slot area with the other members."""
        if state.collectives is None:
            here = tuple(rank for rank in state.ranks if rank in self._context.place.ranks)
            if len(here) < len(state.ranks):  # those on this machine are a group of their own
                part = self.know(Group(here, f"{state.group.tag} of {state.word}"))
                state.collectives = self.open(part, deadline_ns)
            else:
                area = self._open_area(state, deadline_ns)
                state.collectives = GroupCollectives(self._context, area, self._buffer)
        return state.collectives

    def _open_area(self, state: GroupState, deadline_ns: int | None) -> SlotArea:
        context, ranks = self._context, state.ranks
        memory: AnyArray
        if state.index > 0:
            packed = self._receiver.await_introduction(ranks[0], state.word, deadline_ns)
            memory = context.attach(decode_handle(packed), writable=True)
        else:
            memory = self._memory.allocate(ranks)
            packed = packed_handle(context.store, memory, writable=True)
            for rank in ranks[1:]:
                self._sender.introduce(rank, state.word, packed, deadline_ns)
        area = group_area(memory, packed, context.rank)
        if area is None or area.ranks != ranks:
            raise ProtocolError(f"what rank {ranks[0]} sent is not the memory of {state.group}")
        return area

    def opened(self) -> list[GroupCollectives]:
        """Return the collectives of all groups, as far as they are set up."""
        found = (state.collectives for state in self._known.values() if state.collectives is not None)
        return list(dict.fromkeys(found))  # two groups may have the same here

    def close(self) -> None:
        """Release all memory."""
        for collectives in self.opened():
            collectives.close()
        self._known.clear()
        self._buffer.close()
        self._memory = AreaMemory(self._context.store)
