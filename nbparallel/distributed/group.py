"""A group: some of the ranks, named by its members and a tag.

A group is a plain value: creating one needs no communication, and equal values are the same group.  What a
rank keeps of a group in an epoch is a `GroupState` (`collectives.group_state`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nbparallel.distributed.arguments import check_rank
from nbparallel.errors import rank_list

WORLD = None
"""torch's name of the group of all ranks, as in ``group=dist.group.WORLD``."""
_own_rank = -1


def set_own_rank(rank: int) -> None:
    """Let groups know which rank this process is; -1: none."""
    global _own_rank
    _own_rank = rank


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

    def size(self) -> int:
        """Return how many members there are."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return this rank's place in the group; -1 if it is no member."""
        return self.ranks.index(_own_rank) if _own_rank in self.ranks else -1

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
