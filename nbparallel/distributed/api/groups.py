"""Groups, as a rank makes and asks about them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.api.operation_base import GroupLike, OperationBase, untraced
from nbparallel.distributed.arguments import check_group_rank, check_list
from nbparallel.distributed.collectives.movements import ALL_GATHER
from nbparallel.distributed.group import Group, checked_ranks

# What scripts ask about backends and launchers before they choose one; there is one backend.

BACKEND = "nbparallel"
"""Its name."""


def is_backend_available(backend: str) -> bool:
    """Return whether `backend` is ``"nbparallel"`` or ``"gloo"``, which is taken for it."""
    return backend.lower() in (BACKEND, "gloo")


def is_gloo_available() -> bool:
    """Return True: ``init_process_group("gloo")`` works, on shared memory."""
    return True


def is_nccl_available() -> bool:
    """Return False: operations do not move data between GPUs."""
    return False


def is_mpi_available() -> bool:
    """Return False."""
    return False


def is_ucc_available() -> bool:
    """Return False."""
    return False


def is_xccl_available() -> bool:
    """Return False."""
    return False


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


_OF_TORCH = {
    "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc", "device_id", "sort_ranks",
}  # fmt: skip
"""Arguments of torch's `new_group` that scripts pass."""


class GroupOperations(OperationBase):
    """Some of the ranks as a group of their own."""

    @untraced
    def new_group(self, ranks: Iterable[int] | None = None, tag: str = "", **torch_options: Any) -> Group:
        """Return the group of some ranks, sorted; of all without `ranks`.

        No other rank has to call it: a group is named by its members and the tag, and groups of the same name
        are the same.  Its members then call operations with ``group=``; they need not be all in this cell
        before the first one.  Further keyword arguments of torch are taken and mean nothing here, but for
        ``sort_ranks=False``: `split` makes groups in another order.

        Raises
        ------
        ValueError, TypeError
            No such rank, one rank twice, or none at all.
        """
        unknown = torch_options.keys() - _OF_TORCH
        if unknown:
            raise TypeError(f"new_group takes ranks and tag, and has no argument {min(unknown)!r}")
        if not torch_options.get("sort_ranks", True):
            raise ValueError("new_group sorts its ranks: split(color, key) makes groups in the order of key")
        if not isinstance(tag, str):
            raise TypeError(f"tag must be a string, not {type(tag).__name__}")
        members = checked_ranks(range(self.world_size) if ranks is None else ranks, self.world_size)
        return Group(members, tag)

    @untraced
    def host_group(self) -> Group:
        """Return the group of the ranks on this rank's host: of all, unless the session is on several hosts.

        No other rank has to call it.  Inside of it every operation works.
        """
        return Group(tuple(range(self._first, self._behind)))

    def split(self, color: int | None, key: int | None = None, group: GroupLike = None) -> Group | None:
        """Split a group: members that pass the same `color` form one; all members must call it.

        Parameters
        ----------
        color : int or None
            None: this rank will be in no group.
        key : int, optional
            Members are ordered by it, and by rank where keys are equal; by default by rank alone.

        Returns
        -------
        Group or None
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
                raise TypeError(f"{name} must be an int or None, not {type(value).__name__}")
        call = self._operation("split", group)
        ranks = call.state.ranks
        found = call.move(ALL_GATHER, ((None if color is None else int(color), int(key or 0)),))
        if color is None:
            return None
        order = sorted((key, i) for i, (other, key) in enumerate(found) if other == color)
        return Group(tuple(ranks[i] for _, i in order), "" if group is None else group.tag)

    @untraced
    def new_subgroups(
        self,
        group_size: int | None = None,
        group: GroupLike = None,
        timeout: object = None,
        backend: object = None,
        pg_options: object = None,
        group_desc: object = None,
    ) -> tuple[Group | None, list[Group]]:
        """Divide a group into groups of `group_size` neighbours: ``mine, groups = dist.new_subgroups(2)``.

        No other rank has to call it.  By default the ranks of a machine form one group: that is all of them.

        Returns
        -------
        tuple of Group or None, and list of Group
            This rank's group, None if it is no member of `group`; and all of them.

        Raises
        ------
        ValueError
            The number of ranks is no multiple of `group_size`.
        """
        ranks = self.get_process_group_ranks(group)
        size = len(ranks) if group_size is None else group_size
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"group_size must be an int, not {type(size).__name__}")
        if size < 1 or len(ranks) % size:
            raise ValueError(f"group_size={size} must divide the number of ranks, {len(ranks)}")
        parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        return self.new_subgroups_by_enumeration(parts)

    @untraced
    def new_subgroups_by_enumeration(
        self,
        ranks_per_subgroup_list: Sequence[Iterable[int]],
        timeout: object = None,
        backend: object = None,
        pg_options: object = None,
        group_desc: object = None,
    ) -> tuple[Group | None, list[Group]]:
        """Return this rank's of several groups that share no rank (None: it is in none), and all of them.

        No other rank has to call it.

        Raises
        ------
        ValueError
            A rank is in two of the groups; and as `new_group`.
        """
        check_list(ranks_per_subgroup_list, "new_subgroups_by_enumeration", "lists of ranks")
        groups = [self.new_group(ranks) for ranks in ranks_per_subgroup_list]
        members = [rank for group in groups for rank in group]
        if len(set(members)) < len(members):
            twice = min(rank for rank in members if members.count(rank) > 1)
            raise ValueError(
                f"rank {twice} is in more than one of ranks_per_subgroup_list: use new_group for each"
            )
        return next((group for group in groups if self.rank in group), None), groups

    @untraced
    def get_backend(self, group: GroupLike = None) -> str:
        """Return ``"nbparallel"``, for every group."""
        if group is not None:
            self._group_table.know(group)
        return BACKEND

    @untraced
    def get_rank(self, group: GroupLike = None) -> int:
        """Return this rank's number, or its place in a group; -1 if it is no member."""
        return self.rank if group is None else self._group_table.know(group).index

    @untraced
    def get_world_size(self, group: GroupLike = None) -> int:
        """Return how many ranks there are, in all or in a group; -1 if this rank is no member."""
        if group is None:
            return self.world_size
        state = self._group_table.know(group)
        return len(state.ranks) if state.index >= 0 else -1

    @untraced
    def get_process_group_ranks(self, group: GroupLike = None) -> list[int]:
        """Return the ranks of a group, in its order."""
        return list((self._group_table.world if group is None else self._group_table.know(group)).ranks)

    @untraced
    def get_group_rank(self, group: GroupLike, global_rank: int) -> int:
        """Return the place of a rank in a group.

        Raises
        ------
        ValueError
            It is no member.
        """
        state = self._group_table.world if group is None else self._group_table.know(group)
        return state.group_rank(global_rank, None, "global_rank")

    @untraced
    def get_global_rank(self, group: GroupLike, group_rank: int) -> int:
        """Return which rank has a place in a group.

        Raises
        ------
        ValueError
            There is no such place.
        """
        state = self._group_table.world if group is None else self._group_table.know(group)
        return state.ranks[check_group_rank(group_rank, "group_rank", state.ranks)]
