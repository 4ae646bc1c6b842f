"""What a task left: per rank and in all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbparallel.session.values import RankValues


@dataclass(frozen=True, slots=True)
class RankResult:
    """How a task ended on one rank, and what it printed and showed."""

    rank: int
    """Number of the rank."""
    value: Any
    """The last expression's value, or None."""
    text: str
    """The value as text, empty without one."""
    stdout: str
    """What it printed."""
    stderr: str
    """What it wrote to stderr."""
    displays: tuple[Mapping[str, Any], ...]
    """Mime bundles of its rich outputs, in order."""
    seconds: float
    """Wall time of the task on this rank."""
    wait_seconds: float
    """Of it, time spent waiting for other ranks in operations."""
    error: Exception | None
    """What it raised, or None."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell left on all ranks that took part."""

    values: RankValues
    """The last expression's value of each rank that had one."""
    ranks: Mapping[int, RankResult]
    """Everything, by rank."""
    seconds: float
    """Wall time in the notebook, from start to end."""
    notes: tuple[str, ...]
    """Lines of nbparallel's own: a rank came back, a name was replaced."""
    copied_nbytes: Mapping[str, int]
    """Bytes copied on the way to the ranks, by name."""
    shared_nbytes: Mapping[str, int]
    """Bytes that ranks see without a copy, by name."""

    def __getitem__(self, rank: int) -> RankResult:
        """Return everything about one rank; KeyError if it took no part."""
        return self.ranks[rank]

    def __iter__(self) -> Iterator[RankResult]:
        return iter(self.ranks.values())

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        parts = ", ".join(f"{rank}: {result.text or '-'}" for rank, result in self.ranks.items())
        return f"<CellResult of {len(self.ranks)} ranks in {self.seconds:.3f} s: {parts}>"
