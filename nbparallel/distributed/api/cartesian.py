"""Grid: ranks in rows and columns, their coordinates and neighbours."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbparallel.distributed.api.operation_base import GroupLike, OperationBase, untraced
from nbparallel.distributed.arguments import PROC_NULL, check_rank


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
