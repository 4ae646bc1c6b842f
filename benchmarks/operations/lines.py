"""What is measured between ranks, the same for every library; needs numpy only, for it runs under MPI too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
LARGE = 64 * MIB
DIRTY = (MIB, LARGE)
MOVES = ("broadcast", "gather", "scatter", "all_to_all", "reduce_scatter")
VIEWS = ("send", "broadcast", "all_gather", "all_to_all")


@dataclass(frozen=True, slots=True)
class Line:
    """One operation on arrays of one size."""

    operation: str
    nbytes: int = 0
    """Of the largest array that one rank passes."""
    dirty: bool = False
    """Every rank rewrites its array before, and reads it after: not timed, but the caches are not warm."""
    view: bool = False
    """Nothing is copied: only nbparallel can do that."""

    @property
    def key(self) -> str:
        """Its name in results."""
        words = [self.operation, f"{self.nbytes} B"] if self.nbytes else [self.operation]
        return ", ".join([*words, *(["dirty"] if self.dirty else []), *(["view"] if self.view else [])])

    @property
    def title(self) -> str:
        """Its name in tables."""
        for unit, size in (("MB", MIB), ("KB", KIB)):
            if self.nbytes >= size:
                return self.key.replace(f"{self.nbytes} B", f"{self.nbytes // size} {unit}")
        return self.key


def lines(ranks: int, sizes: tuple[int, ...] = SIZES) -> list[Line]:
    """Return what is measured with so many ranks."""
    found = [Line("all_reduce", size) for size in sizes]
    found += [Line("all_reduce", size, dirty=True) for size in DIRTY if size in sizes]
    found.append(Line("barrier"))
    if ranks == 2:
        found += [Line("ping-pong", 8), Line("send", max(sizes))]
    found += [Line(name, max(sizes)) for name in MOVES]
    found += [Line(name, size, view=True) for name in VIEWS for size in (KIB, max(sizes))]
    return found


class Adapter(Protocol):
    """One library on one rank; each operation returns what is called again and again, None if it has none."""

    rank: int
    size: int

    def array(self, shape: tuple[int, ...], dtype: type) -> Any:
        """Return a numpy array, where the library likes it best."""

    def agree(self, value: float) -> float:
        """Return the largest value of all ranks."""

    def barrier(self) -> Callable[[], Any]:
        """Wait for all."""

    def all_reduce(self, x: Any) -> Callable[[], Any] | None:
        """Sum in place."""

    def broadcast(self, x: Any) -> Callable[[], Any] | None:
        """Fill `x` with that of rank 0."""

    def gather(self, out: Any, x: Any) -> Callable[[], Any] | None:
        """Fill the rows of `out` on rank 0."""

    def scatter(self, out: Any, x: Any) -> Callable[[], Any] | None:
        """Fill `out` with a row of `x` of rank 0."""

    def all_to_all(self, out: Any, x: Any) -> Callable[[], Any] | None:
        """Row i is for rank i."""

    def reduce_scatter(self, out: Any, x: Any) -> Callable[[], Any] | None:
        """Fill `out` with the sum of all row `rank`."""

    def send(self, x: Any) -> Callable[[], Any] | None:
        """Rank 0 sends, rank 1 receives into `x`; no other rank does anything."""

    def ping_pong(self, x: Any) -> Callable[[], Any] | None:
        """There and back between ranks 0 and 1."""

    def view(self, operation: str, x: Any) -> Callable[[], Any] | None:
        """Give others a view of `x`; None: this library cannot."""


Call = Callable[[], Any]
Verify = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """A line, ready to be measured by one library on one rank."""

    call: Call
    verify: Verify
    """Whether one call has done what it should."""
    array: Any = None
    """What a dirty line rewrites and reads."""


def case(adapter: Adapter, line: Line) -> Case | None:
    """Make the arrays for a line; None if the library cannot do it."""
    dtype = np.float64 if line.nbytes == 8 else np.float32
    count = max(1, line.nbytes // np.dtype(dtype).itemsize)
    x: Any = None
    if line.operation in MOVES[1:] and not line.view:
        call, verify = _of_parts(adapter, line.operation, count // adapter.size, dtype)
    else:
        call, verify, x = _of_one(adapter, line, count, dtype)
    return None if call is None else Case(call, verify, x)


def _of_one(adapter: Adapter, line: Line, count: int, dtype: type) -> tuple[Call | None, Verify, Any]:
    """Operations that take one array of the same size on every rank."""
    if line.operation == "barrier":
        return adapter.barrier(), lambda: True, None
    x = adapter.array((count,), dtype)
    x[...] = adapter.rank + 1
    if line.view:
        return adapter.view(line.operation, x), lambda: True, None
    right = adapter.size * (adapter.size + 1) // 2 if line.operation == "all_reduce" else 1
    call = getattr(adapter, line.operation.replace("-", "_"))(x)
    return call, lambda: bool((x == right).all()), x


def _of_parts(adapter: Adapter, operation: str, part: int, dtype: type) -> tuple[Call | None, Verify]:
    """Operations that take or give a part for each rank."""
    rank, size = adapter.rank, adapter.size
    numbers = np.arange(size, dtype=dtype).reshape(size, 1)
    out = adapter.array((size, part) if operation in ("gather", "all_to_all") else (part,), dtype)
    out[...] = -1
    if operation == "gather":
        mine = adapter.array((part,), dtype)
        mine[...] = rank
        return adapter.gather(out, mine), lambda: rank != 0 or bool((out == numbers).all())
    rows = adapter.array((size, part), dtype)
    if operation == "scatter":
        rows[...] = numbers
        return adapter.scatter(out, rows), lambda: bool((out == rank).all())
    if operation == "all_to_all":
        rows[...] = numbers + 10 * rank
        return adapter.all_to_all(out, rows), lambda: bool((out == 10 * numbers + rank).all())
    rows[...] = numbers + rank
    right = size * rank + size * (size - 1) // 2
    return adapter.reduce_scatter(out, rows), lambda: bool((out == right).all())
