"""Cartesian grids: places, neighbours and edges, without a message."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import CartesianGrid, Communicator
from nbparallel.distributed.api.groups import fitting_sizes


def grids(dims: tuple[int, ...], periodic: tuple[bool, ...]) -> Iterator[CartesianGrid]:
    """Yield the grid as each rank has it."""
    for place in np.ndindex(*dims):
        yield CartesianGrid(dims, periodic, place, tuple(range(10, 10 + math.prod(dims))))


@pytest.mark.parametrize("dims", [(1,), (5,), (2, 3), (3, 1, 2)])
def test_neighbours(dims: tuple[int, ...]) -> None:
    """A shift is what numpy makes of the ranks as an array: rolled, or PROC_NULL where it ends."""
    for periodic in itertools.product((False, True), repeat=len(dims)):
        for grid in grids(dims, periodic):
            everywhere = np.reshape(grid.ranks, grid.dims)
            me = everywhere[grid.coordinates]
            assert grid.coordinates_of(int(me)) == grid.coordinates
            assert grid.rank_at(grid.coordinates) == me
            for axis, steps in itertools.product(range(len(dims)), (1, -1, 2, 0, 7)):
                source, destination = grid.shift(axis, steps)
                for found, by in ((source, -steps), (destination, steps)):
                    place = grid.coordinates[axis] + by
                    rolled = int(np.roll(everywhere, -by, axis)[grid.coordinates])
                    inside = periodic[axis] or 0 <= place < dims[axis]
                    assert found == (rolled if inside else dist.PROC_NULL)
                assert grid.shift(axis - len(dims), steps) == (source, destination)


@pytest.mark.parametrize(
    ("count", "dims", "found"),
    [
        (6, (0, 0), (3, 2)), (7, (0, 0), (7, 1)), (6, (0, 0, 0), (3, 2, 1)), (6, (0, 3, 0), (2, 3, 1)),
        (24, (0, 0, 0), (4, 3, 2)), (64, (0, 0, 0), (4, 4, 4)), (1, (0,), (1,)), (12, (0, 6), (2, 6)),
        (1000, (0, 0, 0), (10, 10, 10)),
    ],
)  # fmt: skip
def test_sizes_that_fit(count: int, dims: tuple[int, ...], found: tuple[int, ...]) -> None:
    """As MPI_Dims_create: as close to each other as can be, the largest first."""
    assert fitting_sizes(dims, count) == found


def test_ranks_of_a_session_and_of_a_group(ranks: Any) -> None:
    """All ranks, or those of a group in its order; a rank outside has no place."""

    def work(c: Communicator) -> Any:
        grid = dist.grid((2, 2), periodic=[True, False])
        assert grid == dist.grid((0, 2), (True, False))
        assert grid.dims == (2, 2)
        with pytest.raises(ValueError, match=r"dims=\(5,\) has places for 5 ranks, and there are 4"):
            dist.grid(5)
        with pytest.raises(TypeError, match=r"the sizes are one argument: write dist.grid\(\(2, 2\)\)"):
            dist.grid(2, 2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"rank=4 is not in the group|no such rank"):
            grid.coordinates_of(4)
        with pytest.raises(ValueError, match="axis=2: the grid has the axes 0-1"):
            grid.shift(2)
        for axis in ("x", True, 0.5, (0,)):
            with pytest.raises(TypeError, match="axis"):
                grid.shift(axis)
        with pytest.raises(TypeError, match="displacement"):
            grid.shift(0, 0.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="coordinates must be 2 numbers"):
            grid.rank_at([0])
        group = dist.split(0, key=-c.rank)
        backwards = dist.grid(4, group=group)
        assert backwards.coordinates == (3 - c.rank,)
        assert backwards.shift(0)[1] == (c.rank - 1 if c.rank else dist.PROC_NULL)
        some = dist.new_group([1, 3])
        if c.rank in (1, 3):
            assert dist.grid(2, True, some).shift(0) == (4 - c.rank, 4 - c.rank)
        else:
            with pytest.raises(ValueError, match=f"rank {c.rank} is not in the group of ranks 1, 3"):
                dist.grid(2, group=some)
        # every rank gives its number to the next one of its column
        source, destination = grid.shift(0)
        c.send(c.rank, destination)
        return grid.coordinates, c.recv(src=source)

    assert ranks(4, work) == [((0, 0), 2), ((0, 1), 3), ((1, 0), 0), ((1, 1), 1)]
