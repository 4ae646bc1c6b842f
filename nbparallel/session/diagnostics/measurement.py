"""Measurements: the same work on ever more ranks, and the same array through each sharing strategy.

Both are made in turns, since whatever else the machine does slows all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.errors import InternalError, NbParallelError, ParallelError
from nbparallel.errors.text.table import Table, TableView
from nbparallel.session.processes.launch import cpu_count_text, usable_cpus
from nbparallel.session.results import CellResult
from nbparallel.session.session import Session
from nbparallel.session.tasks.dispatch import call_task
from nbparallel.session.tasks.item_map import ProgressBar
from nbparallel.sharing import current_store, get_all_sharing_strategies
from nbparallel.sharing.memory import memory_limits
from nbparallel.sharing.strategies import registry
from nbparallel.transfer import benchmark_probe, pickle_format, pickling
from nbparallel.wire.units import seconds_text, size_text

# Scaling: measured in turns, with Amdahl's law fitted to it.

TURNS = 3
"""Of each number of ranks; the quickest counts, as whatever else the machine does makes the others longer."""
FRESH = (
    "it ran on fresh ranks, which hold nothing of earlier cells: define the name in the notebook, or in the "
    "work that is measured"
)


@dataclass(frozen=True, slots=True, repr=False)
class Scaling(TableView):
    """How long some work took on each number of ranks."""

    counts: tuple[int, ...]
    """Numbers of ranks, ascending."""
    seconds: tuple[float, ...]
    """The quickest run of each: until its slowest rank had ended."""
    cpus: int
    """CPUs that ranks may use here."""

    @property
    def speedup(self) -> tuple[float, ...]:
        """How many times as fast as one rank; without a measurement of one, the smallest number is ideal."""
        return tuple(self.counts[0] * self.seconds[0] / seconds for seconds in self.seconds)

    @property
    def efficiency(self) -> tuple[float, ...]:
        """Speed-up divided by the number of ranks."""
        return tuple(s / n for s, n in zip(self.speedup, self.counts, strict=True))

    @property
    def serial(self) -> float | None:
        """Share of the work that is not divided, by Amdahl's law (least squares of relative errors).

        Of numbers of ranks that are within the CPUs; None: fewer than two are.
        """
        within = [
            (n, seconds) for n, seconds in zip(self.counts, self.seconds, strict=True) if n <= self.cpus
        ]
        if len(within) < 2:
            return None
        parts = [(1 / seconds, 1 / (n * seconds)) for n, seconds in within]
        fixed, divided = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)[0]
        return float(np.clip(fixed / (fixed + divided), 0, 1))

    def predicted(self, count: float) -> float:
        """Return the speed-up that Amdahl's law predicts for so many ranks."""
        serial = self.serial or 0.0
        return 1 / (serial + (1 - serial) / min(count, self.cpus))

    def sentences(self) -> list[str]:
        """Return what follows from the figures."""
        found = []
        if (serial := self.serial) is not None:
            text, most = (
                f"Amdahl's law: {serial:.0%} of the work is not divided".replace("%", " %"),
                max(self.speedup),
            )
            if serial >= 0.02:
                limit = f"stays below {1 / serial:.1f}"
                if 1 / serial < most + 0.05:  # times vary, and the law is fitted to all of them
                    limit = f"will hardly exceed the {most:.2f} that was measured"
                text += f", so the speed-up {limit}"
            found.append(text)
        if self.counts[-1] > self.cpus:
            found.append(f"{cpu_count_text(self.cpus)} here: more ranks than that take turns")
        return found

    def table(self) -> Table:
        """Return the figures."""
        rows = [
            (str(n), seconds_text(t), f"{s:.2f}", f"{e:.0%}".replace("%", " %"))
            for n, t, s, e in zip(self.counts, self.seconds, self.speedup, self.efficiency, strict=True)
        ]
        return Table(
            "",
            ("ranks", "time", "speed-up", "efficiency"),
            rows,
            "\n".join([*self.sentences(), f"the quickest of {TURNS} runs each, in turns"]),
        )


def scaling(
    function: Callable[..., Any], counts: Iterable[int], args: tuple[Any, ...] = (), *, progress: bool = True
) -> Scaling:
    """Measure how a function becomes faster on more ranks.

    Parameters
    ----------
    function : callable
        Called as ``function(*args)`` on every rank, as by `Session.call`: it divides its work by
        `nbparallel.distributed`, such as ``dist.shard``.
    counts : iterable of int
        Numbers of ranks.  Each gets ranks of its own; they take turns, three times each.
    progress : bool
        Show how many runs are done.

    Returns
    -------
    Scaling
        Its ``counts``, ``seconds``, ``speedup``, ``efficiency`` and ``serial``; shown as a picture or text.

    Raises
    ------
    ValueError
        There are no counts, or too many ranks for this machine.
    ParallelError, KeyboardInterrupt
        As `Session.call`.

    Examples
    --------
    >>> nbparallel.scaling(work, [1, 2, 4]).speedup  # doctest: +SKIP
    (1.0, 1.96, 3.7)
    """
    return measure(lambda session: session.perform(call_task(function, args)), counts, progress=progress)


def measure(
    work: Callable[[Session], CellResult], counts: Iterable[int], *, progress: bool = True
) -> Scaling:
    """Measure `work` in sessions of so many ranks."""
    sizes = sorted({operator.index(count) for count in counts})
    if not sizes:
        raise ValueError("scaling needs numbers of ranks, as in 1,2,4")
    best = dict.fromkeys(sizes, float("inf"))
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(Session(size)) for size in sizes]
        bar = ProgressBar(TURNS * len(sizes)) if progress else None
        stack.callback(bar.close if bar else lambda: None)
        for run in range(TURNS):
            for done, (size, session) in enumerate(zip(sizes, sessions, strict=True), 1 + run * len(sizes)):
                try:
                    result = work(session)
                except ParallelError as error:
                    if any(isinstance(each, NameError) for each in error.errors.values()):
                        error.add_note(FRESH)
                    raise
                best[size] = min(best[size], max(rank.seconds for rank in result.ranks.values()))
                if bar is not None:
                    bar.show(done)
    return Scaling(tuple(sizes), tuple(best.values()), usable_cpus())


# Sharing strategies: the same array through each of them, on a real rank, as one table.
#
# Attached arrays are the same pages of memory with every strategy, so computing with them takes the same
# time; strategies differ in allocating, finding and freeing.  All memory is fresh: the pool is emptied before
# each run.

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
"""Bytes of the arrays, by default."""
SECONDS = 20.0
"""How long the whole may take, by default."""
RUNS = 9
"""Of one strategy and size, at most."""
MEMORY_SHARE = 4
"""A size is left out if it is more than 1/4 of what is free."""
FREE_SECONDS = 2.0
"""How long memory may take to come back; it takes a millisecond."""
STEPS = ("allocate", "first touch", "hand over", "attach", "first read", "free")
"""What happens to an array, in order; the rank attaches and reads."""


def strategy_bench(
    session: Session | None = None,
    *,
    strategies: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
) -> Table:
    """Measure what sharing strategies cost here, on rank 0 of a session.

    Returns a row for each size and strategy, the quickest of a size first; what was not measured, and why,
    stands below.  The current strategy stays as it is, and nothing is left behind, also after an interrupt.
    Other ranks do nothing.  Memory that was kept for the next arrays is freed.

    Parameters
    ----------
    session : Session, optional
        Its rank 0 takes the arrays; by default a session of one rank is started for this.
    strategies : sequence of str, optional
        Names; by default all that work here.
    sizes : sequence of int
        Bytes of an array, multiples of eight.
    seconds : float
        About how long it may take: sizes whose turn comes later are left out, and listed.

    Raises
    ------
    ValueError, StrategyUnavailableError
        A strategy does not exist, or does not work here; a size is no positive multiple of eight.
    KeyboardInterrupt
        It was interrupted.
    """
    chosen = list(get_all_sharing_strategies() if strategies is None else strategies)
    for name in chosen:
        registry.find_strategy(name)
    if wrong := [size for size in sizes if size <= 0 or size % 8]:
        raise ValueError(f"sizes are positive multiples of 8 bytes, not {wrong[0]}")
    deadline = time.monotonic() + seconds
    rows: list[tuple[str, ...]] = []
    left_out: list[str] = []
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(Session(1)) if session is None else session
        used.start()
        for nbytes in sorted({1 << 10, *sizes}):  # imports are no strategy's cost
            free = min((limit.free for limit in memory_limits.limits()), default=nbytes * MEMORY_SHARE)
            if nbytes * MEMORY_SHARE > free or (rows and time.monotonic() > deadline):
                reason = f"only {size_text(free)} of memory are free"
                if time.monotonic() > deadline:
                    reason = f"{seconds:g} s are over: --seconds allows more"
                left_out.append(f"left out: from {size_text(nbytes)} on ({reason})")
                break
            runs: dict[str, list[tuple[float, ...]]] = {name: [] for name in chosen}
            for _ in range(RUNS + 1):
                for name in list(chosen):  # in turns: what else the machine does slows all of them
                    try:
                        runs[name].append(_run(used, name, nbytes))
                    except (NbParallelError, OSError) as error:
                        chosen.remove(name)
                        left_out.append(
                            f"{name} failed at {size_text(nbytes)}: {type(error).__name__}: {error}"
                        )
                if time.monotonic() > deadline:
                    break
            if nbytes in sizes:
                kept = {name: every[1:] or every for name, every in runs.items() if every}
                found = {
                    name: [*map(statistics.median, zip(*every, strict=True))] for name, every in kept.items()
                }
                for name, times in sorted(found.items(), key=lambda item: sum(item[1])):
                    rows.append((name, size_text(nbytes), *map(seconds_text, (*times, sum(times)))))
    title = "one array, from the notebook to a rank and back to the system (the quickest first)"
    left_out.append(f"medians of up to {RUNS} runs; other work on the machine makes every time longer")
    return Table(title, ("strategy", "size", *STEPS, "in all"), rows, "\n".join(left_out))


def _run(session: Session, name: str, nbytes: int) -> tuple[float, ...]:
    """Return the seconds of each step of one run."""
    store, clock = current_store(), [time.perf_counter()]
    arrays: list[np.ndarray[Any, Any]] = []
    messages: list[pickle_format.Pickled] = []
    store.drain()
    store.trim()
    before = {record.segment for record in store.segments()}
    try:
        clock[0] = time.perf_counter()
        shares = registry.find_strategy(name).shares
        arrays.append(store.empty(nbytes, np.uint8, strategy=name) if shares else np.empty(nbytes, np.uint8))
        clock.append(time.perf_counter())
        arrays[0].fill(1)
        clock.append(time.perf_counter())
        messages.append(pickling.dumps(arrays, store, broker=session.broker))
        clock.append(time.perf_counter())
        received = session.call(benchmark_probe.receive, messages[0].data)[0]
        messages.clear()
        assert received is not None
        attach, read, total = received
        if total != nbytes // 8 * 0x0101010101010101 % (1 << 64):
            raise InternalError(f"rank 0 read {total}, not what the notebook wrote; please file a bug")
        begun = time.perf_counter()
        arrays.clear()
        _wait_until_freed(before)
        freed = time.perf_counter() - begun
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # an interrupt may come where a frame has an array
        raise
    finally:
        arrays.clear()
        messages.clear()
        _wait_until_freed(before)
    return (*(b - a for a, b in itertools.pairwise(clock)), attach, read, freed)


def _wait_until_freed(before: set[int]) -> None:
    """Wait until no more segments than `before` are there: ranks release them in their own time."""
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        current_store().drain()
        current_store().trim()
        # the user's code may allocate at the same time, or a rank be slow: then only a time is wrong
        if time.monotonic() > deadline or {r.segment for r in current_store().segments()} <= before:
            return
        time.sleep(0.0001)
