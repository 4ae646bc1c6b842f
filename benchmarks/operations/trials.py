"""Every operation as one rank calls it on arrays of a given size, and whether its result is right.

Other than `lines`, which MPI runs as well: for any number of ranks and any size, private or shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.operations.growth import COPY
from nbparallel.distributed import Communicator


@dataclass(frozen=True, slots=True)
class Trial:
    """One operation, ready to be called on one rank."""

    call: Callable[[], object]
    verify: Callable[[], bool]
    """Whether one call has done what it should."""
    summed: Any = None
    """An array that every call adds up; of zeros it stays as it is."""


class Setting:
    """One rank's arrays for one row: of `nbytes`, but with an element for each rank at least in parts."""

    def __init__(self, c: Communicator, nbytes: int, memory: Sequence[Any]) -> None:
        self.c, self.rank, self.size = c, c.rank, c.world_size
        self.count = max(1, nbytes // 8)
        self.part = max(1, self.count // c.world_size)
        self.numbers = np.arange(self.size, dtype=float).reshape(self.size, 1)
        self._memory = list(memory)

    def array(self, *shape: int) -> Any:
        """Return an array of ones: the next part of the shared memory, or private."""
        if not self._memory:
            return np.ones(shape)
        found = self._memory.pop()[: int(np.prod(shape))].reshape(shape)
        found[...] = 1
        return found


def _barrier(s: Setting) -> Trial:
    def holds() -> bool:
        began = time.monotonic_ns()
        s.c.barrier()
        ended = time.monotonic_ns()
        stamps = s.c.all_gather((began, ended))
        return max(first for first, _ in stamps) <= min(last for _, last in stamps)

    return Trial(s.c.barrier, holds)


def _broadcast(s: Setting) -> Trial:
    x = s.array(s.count)
    x += s.rank
    return Trial(lambda: s.c.broadcast(x, 0), lambda: bool((x == 1).all()))


def _reduce(s: Setting) -> Trial:
    x = s.array(s.count)
    return Trial(lambda: s.c.reduce(x, 0), lambda: s.rank > 0 or bool((x == s.size).all()), x)


def _all_reduce(s: Setting) -> Trial:
    x = s.array(s.count)
    return Trial(lambda: s.c.all_reduce(x), lambda: bool((x == s.size).all()), x)


def _gather(s: Setting) -> Trial:
    mine, out = s.array(s.part), s.array(s.size, s.part) if s.rank == 0 else None
    mine *= s.rank
    rows = None if out is None else list(out)
    return Trial(lambda: s.c.gather(mine, rows, 0), lambda: out is None or bool((out == s.numbers).all()))


def _all_gather(s: Setting) -> Trial:
    mine, out = s.array(s.part), s.array(s.size, s.part)
    mine *= s.rank
    rows = list(out)
    return Trial(lambda: s.c.all_gather(rows, mine), lambda: bool((out == s.numbers).all()))


def _scatter(s: Setting) -> Trial:
    out, whole = s.array(s.part), s.array(s.size, s.part) if s.rank == 0 else None
    rows = None
    if whole is not None:
        whole *= s.numbers
        rows = list(whole)
    return Trial(lambda: s.c.scatter(out, rows, 0), lambda: bool((out == s.rank).all()))


def _reduce_scatter(s: Setting) -> Trial:
    out, rows = s.array(s.part), s.array(s.size, s.part)
    rows *= s.numbers
    return Trial(
        lambda: s.c.reduce_scatter_tensor(out, rows), lambda: bool((out == s.size * s.rank).all())
    )  # fmt: skip


def _all_to_all(s: Setting) -> Trial:
    out, rows = s.array(s.size, s.part), s.array(s.size, s.part)
    rows *= 100 * s.rank + s.numbers
    return Trial(
        lambda: s.c.all_to_all_single(out, rows), lambda: bool((out == 100 * s.numbers + s.rank).all())
    )


def _ring(s: Setting) -> Trial:
    mine, theirs = s.array(s.count), s.array(s.count)
    mine *= s.rank
    right, left = (s.rank + 1) % s.size, (s.rank - 1) % s.size

    def call() -> None:
        if s.rank % 2:
            s.c.recv(theirs, src=left)
            s.c.send(mine, right)
        else:
            s.c.send(mine, right)
            s.c.recv(theirs, src=left)

    return Trial(call, lambda: bool((theirs == left).all()))


def _copy(s: Setting) -> Trial:
    mine, other = s.array(s.count), s.array(s.count)
    return Trial(lambda: np.copyto(other, mine), lambda: True)


TRIALS: dict[str, Callable[[Setting], Trial]] = {
    "barrier": _barrier,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "gather": _gather,
    "all_gather": _all_gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ring": _ring,
    COPY: _copy,
}
"""`ring`: every rank sends to the next one and receives from the one before."""
