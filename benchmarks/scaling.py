"""Does processor time grow with ranks and bytes as the model of large groups says?  Exit status 1 if not.

    python -m benchmarks.scaling [--quick] [--ranks 2 4 …] [--operations all_gather …] [--bytes 8 65536 …]

For 2 to 64 ranks on the cores there are: processor time of a rank for one call, because wall time of more
ranks than cores says little.  Results are checked before anything is timed.  With four cores or more also
wall time on all of them beside one core, and what the model (docs/dev/large-groups.md) expects.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.operations.alone import work_alone
from benchmarks.operations.growth import COPY, SHORT, Row, Times, alike, growths, line, offences
from benchmarks.operations.trials import TRIALS, Setting
from benchmarks.report import human_seconds, machine
from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of, run_ranks

RANKS = (2, 4, 8, 16, 32, 64)
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
QUICK_SIZES = (8, 4 << 10, 1 << 20)
ALONE_RANKS = (128,)
"""Besides the others, where one rank works alone."""
OPERATIONS = tuple(name for name in TRIALS if name != COPY)
ROUNDS = 3
MOST_CALLS = 400
"""In one round."""
WARM = 4
"""Calls before anything is timed: by then ranks know which of them fill arrays, and what they can read."""
LEAST_CORES = 4
"""Fewer do not show whether the model is right about cores."""
LEAST_SPEED_UP = 0.5
"""Of the expected one: what is less is called an offence."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one call: medians of rounds, or of launches."""

    mean: float
    """Processor time of a rank, the mean over the ranks."""
    busiest: float
    """The same, or that of rank 0, the root, if it is more."""
    wall: float
    """The longest over the ranks."""


@dataclass(slots=True)
class Measured:
    """What was measured of each row, by the number of ranks."""

    samples: dict[Row, dict[int, Sample]] = field(default_factory=dict)

    def times(self) -> dict[Row, dict[int, float]]:
        """Return processor times of the busiest rank."""
        return {row: {n: s.busiest for n, s in by.items()} for row, by in self.samples.items()}


def rows_of(operations: Sequence[str], sizes: Sequence[int]) -> list[Row]:
    """Return what is measured: private arrays, then shared ones; copies too."""
    found = [Row("barrier", 0, False)] if "barrier" in operations else []
    for shared in (False, True):
        moving = [name for name in operations if name != "barrier"]
        found += [Row(name, nbytes, shared) for nbytes in sorted(sizes) for name in (COPY, *moving)]
    return found


def room() -> int:
    """Return how many bytes of memory may be used."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for text in Path("/proc/meminfo").read_text().splitlines():
        if text.startswith("MemAvailable"):
            found = int(text.split()[1]) << 10
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        found = min(found, int(text))
    return found // 2


def fitting(rows: Iterable[Row], ranks: int, nbytes: int) -> list[Row]:
    """Return the rows whose arrays, two on each rank, fit into so much memory, shared and private ones."""
    return [row for row in rows if 4 * ranks * row.nbytes <= nbytes]


def times_on_rank(c: Communicator, rows: Sequence[Row], seconds: float) -> list[tuple[float, float]]:
    """Return processor and wall seconds of one call of each row on this rank, medians of rounds."""
    most = max([8 * c.world_size, *(row.nbytes for row in rows)])
    memory = [context_of(c).store.zeros((most // 8,), np.float64) for _ in range(2)]
    found = []
    for row in rows:
        trial = TRIALS[row.operation](Setting(c, row.nbytes, memory if row.shared else ()))
        trial.call()
        if c.all_reduce(0 if trial.verify() else 1):
            raise AssertionError(f"{row} is wrong on rank {c.rank} or another one")
        if trial.summed is not None:
            trial.summed[...] = 0
        for _ in range(WARM):
            trial.call()
        began = time.perf_counter()
        trial.call()
        once = c.all_reduce(time.perf_counter() - began, "max")
        found.append(_timed(c, trial.call, max(1, min(MOST_CALLS, int(seconds / once)))))
    return found


def _timed(c: Communicator, call: Callable[[], object], calls: int) -> tuple[float, float]:
    used, walls = [], []
    for _ in range(ROUNDS):
        c.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        used.append((time.process_time() - cpu) / calls)
        walls.append((time.perf_counter() - began) / calls)
    return statistics.median(used), statistics.median(walls)


def measure(rows: Sequence[Row], ranks: Sequence[int], *, launches: int, seconds: float) -> Measured:
    """Measure all rows with each number of ranks; launches of the same number are not one after the other."""
    each: dict[Row, dict[int, list[Sample]]] = {}
    for launch in range(launches):
        for n in ranks:
            print(f"  {n} ranks, launch {launch + 1} of {launches}", file=sys.stderr, flush=True)
            chosen = fitting(rows, n, room())
            outcomes = run_ranks(n, lambda c, chosen=chosen: times_on_rank(c, chosen, seconds), seconds=900)
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
            for row, by_rank in zip(chosen, zip(*(o.value for o in outcomes), strict=True), strict=True):
                used = [cpu for cpu, _ in by_rank]
                mean = statistics.fmean(used)
                sample = Sample(mean, max(used[0], mean), max(wall for _, wall in by_rank))
                each.setdefault(row, {}).setdefault(n, []).append(sample)
    found = Measured()
    for row, by_ranks in each.items():
        found.samples[row] = {n: _median(samples) for n, samples in by_ranks.items()}
    return found


def _median(samples: Sequence[Sample]) -> Sample:
    return Sample(
        statistics.median(s.mean for s in samples), statistics.median(s.busiest for s in samples),
        statistics.median(s.wall for s in samples),
    )  # fmt: skip


def alone(operations: Iterable[str], ranks: Sequence[int], nbytes: int) -> dict[Row, dict[int, float]]:
    """Return what operations take on rank 0, the root, if all others are always on time.

    What a rank with a core of its own takes, but for words that another core has written.
    """
    small = rows_of([name for name in operations if name != "ring"], [nbytes])
    rows = [row for row in small if not row.shared and row.operation != COPY]
    found: dict[Row, dict[int, float]] = {row: {} for row in rows}
    for n in ranks if rows else ():
        print(f"  {n} ranks, of which one works", file=sys.stderr, flush=True)
        for row, seconds in zip(rows, work_alone(n, rows), strict=True):
            found[row][n] = seconds
    return found


def table(what: str, times: Times, ranks: Sequence[int], cores: int) -> str:
    """Return processor times, what each further rank adds to small operations, and how they grow."""
    head = [what, *(f"{n} ranks" for n in ranks), "each adds", "ranks^", "bytes^", ""]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    how = growths(times, cores)
    for row, by_ranks in times.items():
        cells = [human_seconds(by_ranks[n]) if n in by_ranks else "no room" for n in ranks]
        growth, compared = how.get(row), alike(sorted(by_ranks), cores)
        small = growth is not None and row.nbytes <= SHORT and len(compared) > 1
        cells.append(human_seconds(line({n: by_ranks[n] for n in compared})[1]) if small else "–")
        for power in (growth.in_ranks, growth.in_bytes) if growth else (None, None):
            cells.append("–" if power is None else f"{power:.2f}")
        cells.append("" if growth is None else "as modelled" if growth.as_modelled else "**worse**")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_up(
    rows: Sequence[Row], ranks: int, *, launches: int, seconds: float
) -> Iterator[tuple[Row, float, float]]:
    """Yield each row with its speed-up on all cores beside one, and what the model expects of it.

    No more than the number of cores, nor than all ranks' work by the busiest one's, nor, if bytes are most of
    the work, than what copies gain.
    """
    cores = os.sched_getaffinity(0)
    alone: Mapping[Row, Mapping[int, Sample]] = {}
    try:
        os.sched_setaffinity(0, {min(cores)})
        alone = measure(rows, [ranks], launches=launches, seconds=seconds).samples
    finally:
        os.sched_setaffinity(0, cores)
    together = measure(rows, [ranks], launches=launches, seconds=seconds).samples
    gained = {row: alone[row][ranks].wall / by[ranks].wall for row, by in together.items()}
    for row, gain in gained.items():
        before = alone[row][ranks]
        expected = min(len(cores), ranks * before.mean / before.busiest)
        if row.nbytes > SHORT:
            expected = min(expected, gained[Row(COPY, row.nbytes, row.shared)])
        yield row, gain, expected


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and the verdict."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three sizes, one launch; figures are rough")
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="by default 2 to 64; one rank alone also with 128"
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--bytes", type=int, nargs="+", help="of the largest array of a rank")
    parser.add_argument("--launches", type=int, help="of every number of ranks; medians count")
    parser.add_argument("--seconds", type=float, default=0.03, help="of one round of a row; there are three")
    parser.add_argument("--speed-up", action="store_true", help="also on fewer than four cores")
    options = parser.parse_args(arguments)
    cores, ranks = len(os.sched_getaffinity(0)), sorted(set(options.ranks or RANKS))
    sizes = options.bytes or (QUICK_SIZES if options.quick else SIZES)
    launches = options.launches or (1 if options.quick else 3)
    rows, more = rows_of(options.operations, sizes), sorted({*ranks, *(() if options.ranks else ALONE_RANKS)})
    print(f"{machine()}\n")
    work = alone(options.operations, more, min(min(sizes), SHORT))
    print(table("work of rank 0 alone", work, more, more[-1]), end="\n\n", flush=True)
    times = measure(rows, ranks, launches=launches, seconds=options.seconds).times()
    print(table("processor time of a rank", times, ranks, cores), flush=True)
    wrong = [f"alone: {text}" for text in offences(growths(work, more[-1]))] + [
        *offences(growths(times, cores))
    ]
    if options.speed_up or cores >= LEAST_CORES:
        most = max((n for n in ranks if n <= cores), default=ranks[0])
        print(f"\n| {most} ranks, {cores} cores | speed-up beside one core | expected |\n|---|---|---|")
        for row, gain, expected in speed_up(rows, most, launches=launches, seconds=options.seconds):
            print(f"| {row} | {gain:.1f} | {expected:.1f} |")
            if row.operation != COPY and gain < LEAST_SPEED_UP * expected:
                wrong.append(f"{row}: {gain:.1f} times as quick on {cores} cores, not {expected:.1f}")
    print("\n" + ("\n".join(wrong) if wrong else "Every row grows as the model says."))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
