"""Logs as ranks would record them, written down by hand: real numpy views stand for shared arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.distributed.races.access_log import (
    READ,
    WRITE,
    AccessLog,
    Acquire,
    ArrayName,
    Box,
    Elements,
    MemoryAccess,
    Publish,
    Site,
)

AnyArray = npt.NDArray[Any]


def box_of(segment: AnyArray, view: AnyArray) -> Box:
    """Return the region of a view of a segment."""
    offset = view.ctypes.data - segment.ctypes.data
    return Box(offset, view.shape, view.strides, view.itemsize)


def elements(itemsize: int, offsets: Iterable[int]) -> Elements:
    """Return single elements."""
    return Elements(itemsize, np.unique(np.fromiter(offsets, np.int64)).tobytes())


def bytes_of(region: Box | Elements) -> set[int]:
    """Return all bytes of a region, by looking at each index."""
    if isinstance(region, Elements):
        starts = np.frombuffer(region.offsets, np.int64).tolist()
    else:
        starts = [
            region.offset + sum(i * s for i, s in zip(index, region.strides, strict=True))
            for index in np.ndindex(*region.shape)
        ]
    return {start + byte for start in starts for byte in range(region.itemsize)}


class Recorded:
    """What ranks of a cell record.

    Parameters
    ----------
    ranks : int
        How many.
    arrays : ndarray
        By their names: each is a segment.
    """

    def __init__(self, ranks: int, **arrays: AnyArray) -> None:
        self.arrays = arrays
        self.names = tuple(
            ArrayName(name, segment, 0, array.shape, array.strides, array.itemsize)
            for segment, (name, array) in enumerate(arrays.items(), 1)
        )
        self.ranks = [RecordedRank(self, rank) for rank in range(ranks)]
        self._calls = 0

    def __iter__(self) -> Any:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> RecordedRank:
        return self.ranks[rank]

    def region(self, view: AnyArray) -> tuple[int, Box]:
        """Return where a view of one of the arrays lies."""
        for segment, array in enumerate(self.arrays.values(), 1):
            if np.may_share_memory(array, view):
                return segment, box_of(array, view)
        raise LookupError("no view of these arrays")

    def barrier(self, *group: int) -> None:
        """Have ranks wait for each other."""
        self._calls += 1
        members = group or tuple(range(len(self.ranks)))
        keys = tuple(("collective", members, "", self._calls, rank) for rank in members)
        for rank, key in zip(members, keys, strict=True):
            self.ranks[rank].events += [Publish(key), Acquire(keys)]

    def logs(self, *, named: bool = True) -> list[AccessLog]:
        """Return the logs of all ranks."""
        return [rank.log(self.names if named else ()) for rank in self.ranks]


class RecordedRank:
    """What one rank records."""

    def __init__(self, cell: Recorded, rank: int) -> None:
        self.cell, self.rank = cell, rank
        self.events: list[Publish | Acquire] = []
        self.accesses: list[MemoryAccess] = []

    def touch(
        self, view: AnyArray, kind: int, line: int, stored: Any = None, *, label: str = "", door: str = ""
    ) -> None:
        """Touch all elements of a view."""
        segment, box = self.cell.region(view)
        value = None if stored is None else np.asarray(stored, view.dtype).tobytes()
        site = Site(label, line, door)
        self.accesses.append(MemoryAccess(len(self.events), segment, site, kind, box, value))

    def read(self, view: AnyArray, line: int, **more: Any) -> None:
        """Read a view."""
        self.touch(view, READ, line, **more)

    def write(self, view: AnyArray, line: int, stored: Any = None, **more: Any) -> None:
        """Write a view."""
        self.touch(view, WRITE, line, stored, **more)

    def add(self, view: AnyArray, line: int) -> None:
        """Read a view and write it."""
        self.read(view, line)
        self.write(view, line)

    def log(self, names: tuple[ArrayName, ...] = ()) -> AccessLog:
        """Return the log."""
        return AccessLog(self.rank, tuple(self.events), tuple(self.accesses), names, len(self.accesses))


def play(ranks: int, program: str, **shapes: Any) -> Recorded:
    """Return what ranks record who do the steps of a program, one after the other.

    A step is ``WHO reads|writes|adds VIEW on LINE``, where `r` is the rank, or ``barrier``.
    """
    cell = Recorded(ranks, **{name: np.zeros(shape) for name, shape in shapes.items()})
    for step in program.split("; "):
        who, _, rest = step.partition(" ")
        if who == "barrier":
            cell.barrier()
            continue
        verb, view, line = re.fullmatch(r"(\w+)s (.+) on (.+)", rest).groups()  # type: ignore[union-attr]
        for rank in cell.ranks if who == "all" else [cell[int(who)]]:
            names = {**cell.arrays, "r": rank.rank}
            getattr(rank, verb)(eval(view, names), eval(line, names))
    return cell
