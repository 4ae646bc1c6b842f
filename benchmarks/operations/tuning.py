"""Which values of the operations' constants are best on this machine, beside those that the code has.

    python -m benchmarks.operations.tuning [--quick] [--only NAME …] [--rounds N] [--processor-time]

Every value is tried in each round, in another order each time, by ranks that are forked with it. A time is
the longest over the ranks; of the calls in one launch it is their first decile, and of all launches the
least: other users of the machine only make it longer. A value's score is the geometric mean over the
operations of its time beside the best one's: 1.00 is the best of all in everything, and what is within 5 %
of the best score is the plateau.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.operations.knobs import KNOBS, Knob, Work
from benchmarks.report import Section, human_seconds
from nbparallel.distributed import Communicator
from tests.harness.ranks import run_ranks

Clock = Callable[[], float]
NEAR = 1.05
"""What is so near to the best score is as good."""
SECONDS = 0.15
"""Of one launch, about."""
Times = dict[int, dict[str, float]]
"""Value -> operation -> seconds."""


def _times(c: Communicator, work: Work, clock: Clock) -> list[float]:
    """Return the seconds of a call, round by round, on one rank."""
    call = work.make(c)
    for _ in range(3):
        call()
    began = clock()
    for _ in range(work.times):
        call()
    once = float(c.all_reduce(clock() - began, "max"))
    found = []
    for _ in range(max(5, min(200, int(SECONDS / once)))):
        c.barrier()
        began = clock()
        for _ in range(work.times):
            call()
        found.append((clock() - began) / work.times)
    return found


def launch(work: Work, clock: Clock) -> float:
    """Return the seconds of one call, of ranks that are started for it."""
    outcomes = run_ranks(work.ranks, lambda c: _times(c, work, clock), seconds=120)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    times = [outcome.value for outcome in outcomes]
    if clock is time.process_time:
        return max(map(min, times))
    longest = sorted(map(max, zip(*times, strict=True)))
    return longest[len(longest) // 10]


def measure(knob: Knob, rounds: int, clock: Clock = time.perf_counter) -> Times:
    """Try all values of a constant; it is as it was afterwards."""
    chosen = knob.chosen
    values = sorted({*knob.values, chosen})
    found: Times = {value: {} for value in values}
    try:
        for turn in range(rounds):
            order = random.Random(turn).sample(values, len(values))
            for work in knob.works:
                for value in order:
                    knob.set(value)
                    seconds = launch(work, clock)
                    found[value][work.name] = min(seconds, found[value].get(work.name, seconds))
    finally:
        knob.set(chosen)
    return found


def scores(times: Times) -> dict[int, float]:
    """Return how many times longer than the best each value takes, over all operations."""
    works = next(iter(times.values()))
    best = {name: min(by_work[name] for by_work in times.values()) for name in works}
    return {
        value: math.exp(statistics.fmean(math.log(by_work[name] / best[name]) for name in works))
        for value, by_work in times.items()
    }


def plateau(found: dict[int, float]) -> list[int]:
    """Return the values that are as good as the best."""
    return [value for value in sorted(found) if found[value] <= NEAR * min(found.values())]


def human(value: int, unit: str) -> str:
    """Write a value.

    >>> human(512 << 10, "B"), human(64 << 10, "elements"), human(1500, "")
    ('512 KiB', '64 Ki elements', '1500')
    """
    for name, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value % size == 0 and unit:
            return f"{value // size} {name}{'' if unit.startswith('B') else ' '}{unit}"
    return f"{value} {unit}".strip()


def run(
    *, quick: bool, only: Sequence[str] = (), rounds: int = 0, clock: Clock = time.perf_counter
) -> Section:
    """Measure all constants, or some."""
    rows = ["| constant | in the code | its score | best | plateau | |", "|---|---|---|---|---|---|"]
    details = []
    for knob in KNOBS:
        if only and knob.name not in only:
            continue
        print(f"  {knob.name}", file=sys.stderr, flush=True)
        times = measure(knob, rounds or (1 if quick else 5), clock)
        found = scores(times)
        flat, best = plateau(found), min(found, key=lambda value: found[value])
        low, high = human(flat[0], knob.unit), human(flat[-1], knob.unit)
        verdict = "on it" if knob.chosen in flat else "**not on it**"
        rows.append(
            f"| `{knob.name}` | {human(knob.chosen, knob.unit)} | {found[knob.chosen]:.2f} "
            f"| {human(best, knob.unit)}: {found[best]:.2f} | {low} … {high} | {verdict} |"
        )
        details += ["", f"| `{knob.name}` | " + " | ".join(human(v, knob.unit) for v in times) + " |"]
        details += ["|" + "---|" * (len(times) + 1)]
        for work in knob.works:
            cells = [human_seconds(by_work[work.name]) for by_work in times.values()]
            details.append(f"| {work.name} | {' | '.join(cells)} |")
        details.append("| score | " + " | ".join(f"{found[value]:.2f}" for value in times) + " |")
    assert __doc__ is not None
    notes = " ".join(__doc__.rpartition("\n\n")[2].split())
    return Section("Constants", (), notes, "\n".join(rows + details))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round; figures are rough")
    parser.add_argument("--only", nargs="+", choices=[knob.name for knob in KNOBS], default=())
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument(
        "--processor-time", action="store_true", help="of the busiest rank: where others use the machine"
    )
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    section = run(quick=options.quick, only=options.only, rounds=options.rounds, clock=clock)
    print(f"## {section.title}\n\n{section.table}\n\n{section.notes}")


if __name__ == "__main__":
    main()
