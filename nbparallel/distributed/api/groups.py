"""Groups, as a rank makes and asks about them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbparallel.distributed.api.operation_base import GroupLike, OperationBase, untraced
from nbparallel.distributed.arguments import PROC_NULL, check_group_rank, check_int, check_list, check_rank
from nbparallel.distributed.collectives.movements import ALL_GATHER
from nbparallel.distributed.group import Group, checked_ranks

# Grid: ranks in rows and columns, their coordinates and neighbours.


@dataclass(frozen=True, slots=True)
class CartesianGrid:
    """Ranks in a Cartesian grid of any number of axes; `grid` makes one.

    A grid is a plain value, as a group is.  Ranks are those of the world, and the last coordinate counts
    fastest, as in numpy: with dims (2, 3) rank 4 is at (1, 1).

    Attributes
    ----------
    dims : tuple of int
        How many ranks there are along each axis.
    periodic : tuple of bool
        For each axis, whether its last rank is a neighbour of its first.
    coordinates : tuple of int
        Where this rank is.
    ranks : tuple of int
        The rank at each place, row by row: ``np.reshape(grid.ranks, grid.dims)`` shows them.
    """

    dims: tuple[int, ...]
    periodic: tuple[bool, ...]
    coordinates: tuple[int, ...]
    ranks: tuple[int, ...] = field(repr=False)

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """Return where a rank is.

        Raises
        ------
        ValueError
            It is not in the grid.
        """
        return _place(check_rank(rank, "rank", self.ranks), self.dims)

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """Return the rank at a place; `PROC_NULL` beyond the edge of an axis that is not periodic."""
        found = _ints(coordinates, "coordinates")
        if len(found) != len(self.dims):
            raise ValueError(f"coordinates must be {len(self.dims)} numbers, one for each axis, not {found}")
        index = 0
        for i, size, periodic in zip(found, self.dims, self.periodic, strict=True):
            if not (periodic or 0 <= i < size):
                return PROC_NULL
            index = index * size + i % size
        return self.ranks[index]

    def shift(self, axis: int, displacement: int = 1) -> tuple[int, int]:
        """Return the rank from which this one receives, and that to which it sends, in a shift along an axis.

        Parameters
        ----------
        axis : int
            Which one; negative ones count from the last.
        displacement : int
            How many places further the data moves.

        Returns
        -------
        source, destination : int
            `PROC_NULL` beyond the edge of an axis that is not periodic.

        Notes
        -----
        ``MPI_Cart_shift``.
        """
        (which,), (steps,) = _ints((axis,), "axis"), _ints((displacement,), "displacement")
        if not -len(self.dims) <= which < len(self.dims):
            raise ValueError(f"axis={which}: the grid has the axes 0-{len(self.dims) - 1}")
        which %= len(self.dims)

        def moved(by: int) -> int:
            place = list(self.coordinates)
            place[which] += by
            return self.rank_at(place)

        return moved(-steps), moved(steps)


class GridOperations(OperationBase):
    """Arrangements of ranks."""

    @untraced
    def grid(self, dims: Any, periodic: Any = False, group: GroupLike = None) -> CartesianGrid:
        """Arrange ranks in a Cartesian grid; nothing is sent, and no other rank has to call it.

        Parameters
        ----------
        dims : int or sequence of int
            How many ranks along each axis; their product is the number of ranks.  A 0 stands for a number
            that fits: ``(0, 0)`` with 6 ranks makes (3, 2).
        periodic : bool or sequence of bool
            Whether the last rank of an axis is a neighbour of its first; for all axes, or for each.
        group : Group, optional
            The ranks to arrange, in the order of the group; by default all.

        Returns
        -------
        CartesianGrid
            With this rank's `coordinates`, and its neighbours from `shift`.

        Raises
        ------
        ValueError, TypeError
            The sizes do not fit the number of ranks, or this rank is not in the group.

        Notes
        -----
        ``MPI_Cart_create`` with ``MPI_Dims_create``; in mpi4py ``comm.Create_cart``.

        Examples
        --------
        >>> grid = dist.grid((0, 0))  # doctest: +SKIP
        >>> up, down = grid.shift(axis=0)  # doctest: +SKIP
        """
        state = self._group_table.world if group is None else self._group_table.know(group)
        if state.index < 0:
            raise ValueError(
                f"rank {self.rank} is not in {state.group}, and has no place in a grid of this group"
            )
        if isinstance(periodic, int | np.integer) and not isinstance(periodic, bool):
            raise TypeError(f"the sizes are one argument: write dist.grid(({dims!r}, {periodic!r}))")
        sizes = fitting_sizes(_ints(dims, "dims"), len(state.ranks))
        wraps = [periodic] * len(sizes) if isinstance(periodic, bool | np.bool_) else periodic
        if not isinstance(wraps, Sequence | np.ndarray) or not all(
            isinstance(wrap, bool | np.bool_) for wrap in wraps
        ):
            raise TypeError(f"periodic must be True or False, for all axes or for each, not {periodic!r}")
        if len(wraps) != len(sizes):
            raise ValueError(f"periodic has {len(wraps)} values, and dims {len(sizes)}: one for each axis")
        return CartesianGrid(sizes, tuple(map(bool, wraps)), _place(state.index, sizes), tuple(state.ranks))


def _ints(values: Any, name: str) -> tuple[int, ...]:
    found = (values,) if isinstance(values, int | np.integer) else values
    if (
        not isinstance(found, Sequence | np.ndarray)
        or getattr(found, "ndim", 1) != 1
        or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in found)
    ):
        raise TypeError(f"{name} must be an int or a sequence of ints, not {values!r}")
    return tuple(int(n) for n in found)


def _place(index: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(index, dims))


def fitting_sizes(dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the sizes of a grid, with numbers in place of each 0."""
    if not dims or min(dims) < 0:
        raise ValueError(f"dims must be at least one number, none of them negative, not {dims}")
    given = math.prod(n for n in dims if n)
    missing = dims.count(0)
    if given > count or count % given or (not missing and given != count):
        raise ValueError(
            f"dims={dims} has places for {'a multiple of ' if missing else ''}{given} ranks, and there are "
            f"{count}: choose sizes whose product is {count}, 0 for a size that fits, or arrange some of the "
            "ranks with group=dist.new_group(…)"
        )
    chosen = iter(_balanced(count // given, missing) if missing else ())
    return tuple(n or next(chosen) for n in dims)


@functools.cache
def _balanced(count: int, parts: int) -> tuple[int, ...]:
    """Return numbers whose product is `count`, as close to each other as can be, the largest first."""
    if parts == 1:
        return (count,)
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    return min(tuple(sorted((d, *_balanced(count // d, parts - 1)), reverse=True)) for d in divisors)


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
    """Return False: operations move data between processes of one machine, on CPUs."""
    return False


is_mpi_available = is_ucc_available = is_xccl_available = is_nccl_available


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
        own_key = 0 if key is None else check_int(key, "key")
        mine = None if color is None else check_int(color, "color"), own_key
        call = self._operation("split", group)
        ranks = call.state.ranks
        found = call.move(ALL_GATHER, (mine,))
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
        size = len(ranks) if group_size is None else check_int(group_size, "group_size", 1)
        if len(ranks) % size:
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
        state = self._group_table.world if group is None else self._group_table.know(group)
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
