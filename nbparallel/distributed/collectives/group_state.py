"""The state of the groups that a rank knows: member numbers, slot areas and pending collectives, per epoch.

The members of a group communicate through a slot area of their own.  The first member allocates it in its
first operation in the group and sends the handle to the others; they block in an ordinary receive, in which
deadlocks are detected as in any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbparallel.distributed.arguments import check_group_rank, check_rank
from nbparallel.distributed.collectives.group_collectives import GroupCollectives
from nbparallel.distributed.group import Group
from nbparallel.distributed.point_to_point.receiver import Receiver
from nbparallel.distributed.point_to_point.sender import Sender
from nbparallel.distributed.runtime.host_boundary import boundary_error, elsewhere
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, decode_handle, encode_handle
from nbparallel.distributed.slots.slot_area import SlotArea, group_area, group_nbytes, prepare
from nbparallel.errors import InternalError, ProtocolError, rank_list
from nbparallel.sharing.store import Store

MANY = 32
"""After so many new groups the staging buffers of all are released: they are segments of their own."""
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
        self, context: RankContext, sender: Sender, receiver: Receiver, world: GroupCollectives
    ) -> None:
        self._context, self._sender, self._receiver = context, sender, receiver
        all_ranks = Group(tuple(range(context.world_size)))
        self.world = GroupState(all_ranks, context.rank, world)
        self._known = {all_ranks: self.world}
        self._memory = AreaMemory(context.store)
        self._opened = 0

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
                if (hosts := context.peers.hosts) and (others := elsewhere(hosts, missing)):
                    raise boundary_error(hosts, others, f"an operation of {state.group} that is called")
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
            self._opened += 1
            if self._opened % MANY == 0:
                self._release_staging()
            state.collectives = GroupCollectives(self._context, self._open_area(state, deadline_ns))
        return state.collectives

    def _release_staging(self) -> None:
        """Release the staging buffers of all groups: a program that makes many seldom uses all of them."""
        for state in self._known.values():
            if state.collectives is not None and state is not self.world:
                state.collectives.release_staging()

    def _open_area(self, state: GroupState, deadline_ns: int | None) -> SlotArea:
        context, ranks = self._context, state.ranks
        memory: AnyArray
        if state.index > 0:
            packed = self._receiver.await_introduction(ranks[0], state.word, deadline_ns)
            memory = context.attach(decode_handle(packed), writable=True)
        else:
            memory = self._memory.allocate(ranks)
            handle = context.store.handle(memory, writable=True)
            if handle is None:
                raise InternalError("the store's own array is not shared")
            packed = encode_handle(handle)
            for rank in ranks[1:]:
                self._sender.introduce(rank, state.word, packed, deadline_ns)
        area = group_area(memory, packed, context.rank)
        if area is None or area.ranks != ranks:
            raise ProtocolError(f"what rank {ranks[0]} sent is not the memory of {state.group}")
        return area

    def advance(self) -> None:
        """Advance pending collectives, without blocking."""
        for state in list(self._known.values()):
            if state.collectives is not None:
                state.collectives.pending.advance()

    def flush(self) -> None:
        """Complete all pending collectives."""
        for state in list(self._known.values()):
            if state.collectives is not None:
                state.collectives.pending.flush()

    def drop(self) -> None:
        """Drop pending collectives at the end of their cell."""
        for state in self._known.values():
            if state.collectives is not None:
                state.collectives.pending.drop()

    def begin_cell(self) -> None:
        """Count the calls of every group anew."""
        for state in self._known.values():
            if state.collectives is not None:
                state.collectives.begin_cell()

    def release(self) -> None:
        """Release copies that all readers have read."""
        for state in self._known.values():
            if state.collectives is not None:
                state.collectives.release()

    def close(self) -> None:
        """Release all memory."""
        for state in self._known.values():
            if state.collectives is not None:
                state.collectives.close()
        self._known.clear()
        self._memory = AreaMemory(self._context.store)
