"""Group: some of the ranks, named by themselves and a tag, and what each rank keeps of it in an epoch.

A group is a plain value: making one talks to nobody, and equal ones are the same group.  Its members meet in
memory of their own (`area`), which its first member makes in its first operation there and tells the others
of by a message; theirs is to wait for that message, in which deadlocks are seen as in any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.arguments import check_place, check_rank
from nbparallel.distributed.collectives.collectives import GroupCollectives
from nbparallel.distributed.point_to_point.receiver import Receiver
from nbparallel.distributed.point_to_point.sender import Sender
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import decode_handle, encode_handle
from nbparallel.distributed.slots.slot_area import SlotArea, group_area, group_nbytes, prepare
from nbparallel.errors import InternalError, ProtocolError, rank_list

WORLD = None
"""torch's name of the group of all ranks, as in ``group=dist.group.WORLD``."""


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the ranks; `new_group` and `split` make one.

    Attributes
    ----------
    ranks : tuple of int
        The members' ranks in the world, in the order of the group.
    tag : str
        Distinguishes groups of the same ranks.
    """

    ranks: tuple[int, ...]
    tag: str = ""

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    @property
    def word(self) -> int:
        """The name as one word, which travels with messages; 0 is the world."""
        text = repr((self.ranks, self.tag)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1

    def __str__(self) -> str:
        return "the group of " + rank_list(self.ranks) + (f" with tag {self.tag!r}" if self.tag else "")


def checked_ranks(ranks: Any, world_size: int) -> tuple[int, ...]:
    """Return the members of a new group, sorted."""
    if not isinstance(ranks, Iterable) or getattr(ranks, "ndim", 1) == 0:
        raise TypeError(f"ranks must be a list of ranks, or None for all, not {type(ranks).__name__}")
    members = list(ranks)
    for rank in members:
        check_rank(rank, "ranks", tuple(range(world_size)))
    if not members:
        raise ValueError("a group needs at least one rank")
    if len(set(members)) < len(members):
        raise ValueError(f"a rank can be in a group only once, not {members}")
    return tuple(sorted(int(rank) for rank in members))


class GroupState:
    """What one rank keeps of one group."""

    __slots__ = ("cell", "collectives", "group", "index", "ranks", "word")

    def __init__(self, group: Group, index: int, collectives: GroupCollectives | None = None) -> None:
        self.group, self.ranks, self.index = group, group.ranks, index
        self.collectives = collectives
        """None until the first operation."""
        self.word = 0 if collectives is not None else group.word
        self.cell = 0
        """The last cell in which all members were known to take part."""

    def place(self, rank: Any, place: Any, name: str, default: int | None = None) -> int:
        """Return the member that ``name`` (in the world) or ``group_name`` (in the group) means."""
        if rank is not None and place is not None:
            raise ValueError(f"{name} and group_{name} both say which rank is meant: pass one of them")
        if place is not None:
            return check_place(place, f"group_{name}", self.ranks)
        if rank is None:
            if default is None:
                raise TypeError(f"{name} is missing: the rank to talk to")
            rank = default
        return check_rank(rank, name, self.ranks, world=self.word == 0)


class GroupTable:
    """All groups of one rank in one epoch."""

    def __init__(
        self, context: RankContext, sender: Sender, receiver: Receiver, world: GroupCollectives
    ) -> None:
        self._context, self._sender, self._receiver = context, sender, receiver
        everybody = Group(tuple(range(context.world_size)))
        self.world = GroupState(everybody, context.rank, world)
        self._known = {everybody: self.world}

    def find(self, group: object) -> GroupState:
        """Return the team of a group, for an operation that begins now.

        Raises
        ------
        TypeError
            `group` is none.
        ValueError
            This rank is no member, or a member takes no part in this cell.
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
                verb = "is" if len(missing) == 1 else "are"
                raise ValueError(
                    f"{rank_list(missing)} {verb} not in this cell, and an operation of {state.group} needs "
                    "all its ranks"
                )
            state.cell = context.cell.number
        return state

    def know(self, group: object) -> GroupState:
        """Return the team of a group, whoever is in it."""
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
        """Return the group's operations; the first call meets the other members."""
        if state.collectives is None:
            state.collectives = GroupCollectives(self._context, self._meet(state, deadline_ns))
        return state.collectives

    def _meet(self, state: GroupState, deadline_ns: int | None) -> SlotArea:
        context, ranks = self._context, state.ranks
        memory: np.ndarray[Any, np.dtype[Any]]
        if state.index > 0:
            packed = self._receiver.await_introduction(ranks[0], state.word, deadline_ns)
            memory = context.attach(decode_handle(packed), writable=True)
        else:
            memory = context.store.empty((group_nbytes(len(ranks)),), np.uint8)
            prepare(memory, ranks)
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
        """Let collectives that were begun go on, without waiting."""
        for state in list(self._known.values()):
            if state.collectives is not None:
                state.collectives.begun.advance()

    def flush(self) -> None:
        """Finish all collectives that were begun."""
        for state in list(self._known.values()):
            if state.collectives is not None:
                state.collectives.begun.flush()

    def drop(self) -> None:
        """End what was begun with its cell."""
        for state in self._known.values():
            if state.collectives is not None:
                state.collectives.begun.drop()

    def release(self) -> None:
        """Let go of copies that everybody has read."""
        for state in self._known.values():
            if state.collectives is not None:
                state.collectives.release()

    def close(self) -> None:
        """Let go of all memory."""
        for state in self._known.values():
            if state.collectives is not None:
                state.collectives.close()
        self._known.clear()
