"""The constants that were chosen by measuring, and what each of them is measured by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.adapters import Ours
from benchmarks.operations.lines import LARGE, Line, case
from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives import direct, in_place, reduce
from nbparallel.distributed.data_parallel import gradients
from nbparallel.distributed.point_to_point import endpoints, packing, streaming
from nbparallel.distributed.runtime import waiting

KIB, MIB = 1 << 10, 1 << 20
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Work:
    """One operation that a constant matters for."""

    name: str
    make: Callable[[Communicator], Call]
    """Called on every rank; returns what is timed."""
    ranks: int = 2
    times: int = 1
    """How often it is called in one round: a round should take about a millisecond."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One constant."""

    places: Sequence[tuple[ModuleType, str]]
    """Where it stands: its own module first, then those that have imported it."""
    values: Sequence[int]
    works: Sequence[Work]
    unit: str = ""

    @property
    def name(self) -> str:
        """Return module and name."""
        module, name = self.places[0]
        return f"{module.__name__.rpartition('.')[2]}.{name}"

    @property
    def chosen(self) -> int:
        """Return what the code says."""
        module, name = self.places[0]
        return int(getattr(module, name))

    def set(self, value: int) -> None:
        """Let ranks that are forked from now on have another value."""
        for module, name in self.places:
            setattr(module, name, value)


def _line(operation: str, nbytes: int, *, shared: bool) -> Callable[[Communicator], Call]:
    def make(c: Communicator) -> Call:
        made = case(Ours(c, shared=shared), Line(operation, nbytes))
        assert made is not None, "nbparallel has all of them"
        if made.array is not None:
            made.array[...] = 0  # and stays 0, however often it is summed
        return made.call

    return make


def _large(operation: str, *, shared: bool, ranks: Sequence[int] = (2, 4)) -> Iterator[Work]:
    for n in ranks:
        kind = "shared" if shared else "private"
        yield Work(f"{operation} 64 MB, {kind}, {n} ranks", _line(operation, LARGE, shared=shared), n)


def _private(operation: str, nbytes: int, ranks: int) -> Work:
    size = f"{nbytes // MIB} MB" if nbytes >= MIB else f"{nbytes // KIB} KB"
    return Work(f"{operation} {size}, private, {ranks} ranks", _line(operation, nbytes, shared=False), ranks)


def _small(operation: str, sizes: Sequence[int], *, shared: bool = False, times: int = 50) -> Iterator[Work]:
    for size in sizes:
        kind = "shared" if shared else "private"
        human = f"{size // KIB} KB" if size >= KIB else f"{size} B"
        yield Work(f"{operation} {human}, {kind}", _line(operation, size, shared=shared), times=times)


def _gradients(count: int, nbytes: int, ranks: int) -> Work:
    def make(c: Communicator) -> Call:
        arrays: list[Any] = [np.zeros(nbytes // 4, np.float32) for _ in range(count)]
        return lambda: c.average_gradients(arrays)

    return Work(f"average_gradients {count} × {nbytes // KIB} KB, {ranks} ranks", make, ranks, 5)


def _powers(low: int, high: int) -> list[int]:
    return [1 << i for i in range(low.bit_length() - 1, high.bit_length())]


KNOBS = (
    Knob(
        [(direct, "PIECE")], _powers(256 * KIB, 4 * MIB),
        [_private("all_reduce", size, n) for size in (512 * KIB, 2 * MIB, 6 * MIB) for n in (2, 4)], "B",
    ),
    Knob([(direct, "BLOCK")], _powers(8 * KIB, 512 * KIB), [*_large("all_reduce", shared=True)], "elements"),
    Knob(
        [(direct, "BLOCK_NBYTES")], _powers(64 * KIB, 4 * MIB), [*_large("broadcast", shared=True)], "B",
    ),
    Knob(
        [(in_place, "BLOCK")], _powers(256 * KIB, 8 * MIB),
        [_private("all_reduce", size, n) for size in (16 * MIB, LARGE) for n in (2, 4)], "B",
    ),
    Knob(
        [(in_place, "LEAST_MOVED")], (128 * KIB, 256 * KIB, 512 * KIB, 2 * MIB, 1 << 40),
        [
            _private(operation, size * n, n)
            for operation in ("scatter", "all_to_all") for size in (160 * KIB, 320 * KIB, MIB) for n in (2, 4)
        ], "B",
    ),
    Knob(
        [(in_place, "LEAST_COMBINED")], (MIB, 4 * MIB, 8 * MIB, 16 * MIB, 1 << 40),
        [_private("all_reduce", size, n) for size in (MIB, 4 * MIB, 8 * MIB, 16 * MIB) for n in (2, 4)], "B",
    ),
    Knob(
        [(streaming, "CHUNK")], _powers(64 * KIB, 2 * MIB), [*_large("send", shared=False, ranks=(2,))], "B",
    ),
    Knob([(streaming, "CHUNKS")], (2, 3, 4, 6, 8), [*_large("send", shared=False, ranks=(2,))]),
    Knob(
        [(endpoints, "INLINE"), (streaming, "LEAST"), (packing, "LEAST")], _powers(4 * KIB, 32 * KIB),
        [*_small("ping-pong", (6 * KIB, 12 * KIB, 24 * KIB, 30 * KIB))], "B",
    ),
    Knob(
        [(packing, "SHORT")], (64, *_powers(KIB, 32 * KIB)),
        [*_small("ping-pong", (200, 3 * KIB, 12 * KIB, 24 * KIB, 30 * KIB))], "B",
    ),
    Knob(
        [(reduce, "SHARED_INLINE")], _powers(4 * KIB, 64 * KIB),
        [*_small("all_reduce", (3 * KIB, 12 * KIB, 24 * KIB, 48 * KIB), shared=True)], "B",
    ),
    Knob(
        [(gradients, "ALONE")], _powers(2 * KIB, 64 * KIB),
        [_gradients(16, size, ranks) for ranks in (2, 4) for size in (4 * KIB, 12 * KIB, 24 * KIB, 48 * KIB)],
        "B a member",
    ),
    Knob([(waiting, "SPINS")], (100, 400, 1500, 6000), [*_small("all_reduce", (8, 32 * KIB), times=200)]),
)  # fmt: skip
"""Not here: sizes that follow from another one (a slot's payload, the ring)."""
