"""Operations between ranks beside gloo, MPICH and Open MPI; what is measured stands in `lines`.

nbparallel and gloo run in the same processes and take turns; MPI starts its own, and launches take turns.
The time of an operation is the longest over the ranks; medians over rounds, then over launches.

    python -m benchmarks.operations.collectives [--ranks 2 4] [--launches 1] [--seconds 0.1]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.adapters import Gloo, Ours
from benchmarks.operations import mpi
from benchmarks.operations.goals import Goal, goals
from benchmarks.operations.lines import LARGE, Line, lines
from benchmarks.operations.rounds import Times, measure
from benchmarks.report import Section, human_seconds, installed
from nbparallel.distributed import Communicator
from tests.harness.ranks import run_ranks

OURS = ("shared", "private")
GLOO = "gloo"
NOTES = (
    "All ranks are processes of this machine, all checks on; float32, but 8 B is one float64. *Shared*: our "
    "ranks' arrays lie in shared memory, *private*: they do not. Sizes are of the largest array that one "
    "rank passes; outputs are made before. The time is the longest over the ranks, medians of rounds and "
    "launches, peers in turns; results are checked before anything is timed. *Dirty*: every rank rewrites "
    "its array before and reads it after, which is not timed. gloo on lo with one thread; MPI in place "
    "where it can be, Open MPI with yielding when there are more ranks than cores, the better of thread "
    "levels `multiple` and `serialized`."
)


@dataclass(slots=True)
class Measured:
    """Seconds per call for one number of ranks."""

    ranks: int
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Line -> contender -> median."""
    copy_nbytes_per_second: float = 0.0
    """Read and written by each rank when all copy at the same time."""
    copy_alone: float = 0.0
    """Seconds to copy 64 MB on one rank, while the others wait."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of MPI, by name; or why it was not measured."""
    slow: list[str] = field(default_factory=list)
    """What was given up."""

    def of(self, line: Line) -> dict[str, float]:
        """Return what was measured on a line."""
        return self.seconds.get(line.key, {})

    def mpi(self, line: Line) -> dict[str, float]:
        """Return the better thread level of each implementation of MPI."""
        best: dict[str, float] = {}
        for name, seconds in self.of(line).items():
            library = name.partition("/")[0]
            if library not in (*OURS, GLOO):
                best[library] = min(seconds, best.get(library, seconds))
        return best


def _work(c: Communicator, chosen: Sequence[Line], folder: str, seconds: float) -> Times:
    contenders: dict[str, Any] = {name: Ours(c, shared=name == "shared") for name in OURS}
    if installed("torch"):
        contenders[GLOO] = Gloo(c.rank, c.world_size, folder)
    return measure(contenders, chosen, contenders["private"], seconds)


def _copy_speed(c: Communicator) -> tuple[float, float]:
    """Return bytes per second when all copy, and seconds for 64 MB when rank 0 does alone."""
    a, b = np.ones(LARGE // 4, np.float32), np.ones(LARGE // 4, np.float32)

    def copy() -> float:
        c.barrier()
        began = time.perf_counter()
        np.copyto(a, b)
        return time.perf_counter() - began

    together = statistics.median(copy() for _ in range(9))
    alone = 0.0
    for _ in range(9):
        alone = min(alone or 1e9, copy() if c.rank == 0 else c.barrier() or 1e9)
        c.recv(src=0, tag=1) if c.rank else [c.send(0, r, tag=1) for r in range(1, c.world_size)]
    return 2 * LARGE / together, alone


def _longest(found: Sequence[Times]) -> dict[str, dict[str, float]]:
    """Return the median over rounds of the longest time over ranks."""
    return {
        line: {
            name: statistics.median(map(max, zip(*(times[line][name] for times in found), strict=True)))
            for name in contenders
        }
        for line, contenders in found[0].items()
    }


def _ours(ranks: int, chosen: Sequence[Line], seconds: float) -> list[Times]:
    with tempfile.TemporaryDirectory(prefix="nbp-bench-") as folder:
        outcomes = run_ranks(ranks, lambda c: _work(c, chosen, folder, seconds), seconds=600)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def measured(ranks: int, *, launches: int, seconds: float) -> Measured:
    """Measure all contenders."""
    found = Measured(ranks)
    collected: dict[str, dict[str, list[float]]] = {}
    levels = [(library, level) for library in mpi.LIBRARIES if library.installed for level in mpi.LEVELS]
    for library in mpi.LIBRARIES:
        if not library.installed:
            found.versions[library.name] = "not installed"
    for launch in range(launches):
        print(f"  {ranks} ranks, launch {launch + 1} of {launches}", file=sys.stderr, flush=True)
        runs = {"": _longest(_ours(ranks, lines(ranks), seconds))}
        for library, level in list(levels):
            if (library, level) not in levels:
                continue  # it did not end at another level
            try:
                version, times = mpi.measure(library, ranks, level, seconds)
            except subprocess.TimeoutExpired:
                levels = [(other, at) for other, at in levels if other is not library]
                found.slow.append(
                    f"{library.name} (thread level {level}) had not ended after {mpi.LAUNCH_SECONDS} s"
                )
                continue
            found.versions[library.name] = version
            runs[f"{library.name}/{level}"] = _longest(times)
        for run, by_line in runs.items():
            for line, by_name in by_line.items():
                for name, value in by_name.items():
                    collected.setdefault(line, {}).setdefault(run or name, []).append(value)
    found.seconds = {
        line: {name: statistics.median(values) for name, values in by_name.items()}
        for line, by_name in collected.items()
    }
    speeds = [outcome.value for outcome in run_ranks(ranks, _copy_speed, seconds=60)]
    found.copy_nbytes_per_second = min(speed for speed, _ in speeds)
    found.copy_alone = speeds[0][1]
    return found


def table(found: Measured) -> str:
    """Return the table for one number of ranks."""
    head = ["", *OURS, GLOO, *(library.name for library in mpi.LIBRARIES), "× gloo", "× MPI", "goals"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for line in lines(found.ranks):
        by_name = found.of(line)
        if by_name:
            rows.append(_row(found, line, by_name))
    return "\n".join(rows)


def _row(found: Measured, line: Line, by_name: dict[str, float]) -> str:
    best = found.mpi(line)
    cells = [line.title, *(_time(by_name.get(name)) for name in (*OURS, GLOO))]
    cells += [_time(best.get(library.name)) for library in mpi.LIBRARIES]
    for peer in (by_name.get(GLOO), min(best.values(), default=None)):
        ratios = [peer / by_name[name] for name in OURS if name in by_name] if peer else []
        cells.append(" / ".join(f"{ratio:.1f}" for ratio in ratios) or "–")
    verdicts = [_verdict(goal, found, line) for goal in goals(line, found.ranks)]
    return "| " + " | ".join([*cells, "; ".join(verdicts) or "–"]) + " |"


def _verdict(goal: Goal, found: Measured, line: Line) -> str:
    met = goal.is_met(found.of(line), found.mpi(line), found.copy_alone, limit_seconds(found, line))
    return f"{goal.text}: {'not measured' if met is None else 'met' if met else '**missed**'}"


def limit_seconds(found: Measured, line: Line) -> float:
    """Return how long the traffic of an all_reduce in place takes at the speed of copying: 2·N·S bytes."""
    return 2 * line.nbytes / found.copy_nbytes_per_second


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else human_seconds(seconds)


def run(*, quick: bool) -> list[Section]:
    """Measure with 2 and 4 ranks, and draw."""
    sections = []
    for ranks in (2, 4):
        found = measured(ranks, launches=1 if quick else 5, seconds=0.05 if quick else 0.15)
        versions = ", ".join([*(f"{name}: {text}" for name, text in found.versions.items()), *found.slow])
        speed = (
            f"At the same time every rank copies {found.copy_nbytes_per_second / 1e9:.0f} GB/s (read and "
            f"written), one alone copies 64 MB in {human_seconds(found.copy_alone)}. {versions}."
        )
        drawn = f"../../docs/images/explanation/all_reduce-{ranks}.svg"
        picture = f"![latency and bus bandwidth of all_reduce]({drawn})"
        sections.append(
            Section(
                f"Operations between {ranks} ranks", (), f"{NOTES if ranks == 2 else ''}\n\n{speed}".strip(),
                table(found) + ("" if quick else "\n\n" + picture),
            )
        )  # fmt: skip
    return sections


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each line and contender")
    options = parser.parse_args()
    for ranks in options.ranks:
        print(table(measured(ranks, launches=options.launches, seconds=options.seconds)), flush=True)


if __name__ == "__main__":
    main()
