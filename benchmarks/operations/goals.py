"""What we want of the operations between ranks, beside their peers, on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.operations.lines import KIB, LARGE, MIB, MOVES, Line


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal for one line."""

    text: str
    ours: str = "shared"
    """Which of our arrays."""
    gloo: float = 0.0
    """At least so many times faster than gloo."""
    mpi: float = 0.0
    """Than the better MPI."""
    library: str = ""
    """Ahead of this MPI."""
    seconds: float = 0.0
    """At most so long."""
    copy: float = 0.0
    """At least so much of the speed of a copy."""
    limit: float = 0.0
    """At least so much of the traffic limit."""

    def is_met(
        self, seconds: Mapping[str, float], mpi: Mapping[str, float], copy: float, limit: float
    ) -> bool | None:
        """Return whether it is met; None if the peer or we were not measured."""
        ours = seconds.get(self.ours)
        if ours is None:
            return None
        if self.gloo:
            return None if "gloo" not in seconds else seconds["gloo"] >= self.gloo * ours
        if self.mpi:
            return min(mpi.values()) >= self.mpi * ours if mpi else None
        if self.library:
            return None if self.library not in mpi else mpi[self.library] > ours
        if self.seconds:
            return ours <= self.seconds
        return (self.copy * ours <= copy) if self.copy else self.limit * ours <= limit


def _gloo(times: float, ours: str = "shared") -> Goal:
    return Goal(f"{ours} ≥ {times:g} × gloo", ours, gloo=times)


def _mpi(times: float, ours: str = "shared") -> Goal:
    return Goal(f"{ours} ≥ {times:g} × MPI", ours, mpi=times)


def _within(microseconds: float) -> Goal:
    return Goal(f"≤ {microseconds:g} µs", seconds=microseconds * 1e-6)


def goals(line: Line, ranks: int) -> list[Goal]:
    """Return the goals for a line with so many ranks."""
    two = ranks == 2
    if line.dirty:
        return []
    if line.view:
        return [_within(50 if two else 120)]
    if line.operation == "all_reduce":
        return _all_reduce(line.nbytes, two=two)
    if line.operation == "barrier":
        return [_within(2 if two else 10)]
    if line.operation == "ping-pong":
        return [_within(4), _gloo(10)]
    if line.operation == "send":
        return [Goal("≥ 0.85 of a copy", copy=0.85), _gloo(2)]
    return [_gloo(3), _mpi(1.2)] if line.operation in MOVES else []


def _all_reduce(nbytes: int, *, two: bool) -> list[Goal]:
    if nbytes <= KIB:
        found = [_gloo(30), _gloo(60), _within(4 if two else 12)]
        return found if two else [*found, Goal("ahead of MPICH", library="MPICH")]
    if nbytes <= MIB:
        return [_gloo(25 if two else 20), _mpi(2)]
    found = [_gloo(6), _gloo(8), _gloo(3, "private"), _mpi(1.3, "private")]
    if nbytes == LARGE:
        found.insert(2, _mpi(4))
    return [*found, Goal("≥ 0.7 of the traffic limit", limit=0.7)]
