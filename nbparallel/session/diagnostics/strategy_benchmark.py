"""Measuring sharing strategies: the same array through each of them, on a real rank.

Attached arrays are the same pages of memory with every strategy, so computing with them takes the same time;
strategies differ in allocating, finding and freeing.  All memory is fresh: the pool is emptied before each
run.  Small arrays are made in batches, as they are packed; the times are for one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nbparallel.errors import InternalError, NbParallelError
from nbparallel.session.diagnostics.strategy_report import Steps, StrategyCost, StrategyFigures, StrategyTime
from nbparallel.session.processes.limits import usable_cpus
from nbparallel.session.session import Session
from nbparallel.sharing import SegmentBroker, current_store, get_all_sharing_strategies
from nbparallel.sharing.memory import memory_limits
from nbparallel.sharing.strategies import registry
from nbparallel.transfer import benchmark_probe, pickle_format, pickling
from nbparallel.wire.units import size_text

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
"""Bytes of the arrays, by default."""
SECONDS = 20.0
"""How long the whole may take, by default."""
RUNS = 9
"""Of one strategy and size, at most."""
FEWEST_RUNS = 3
"""At least, unless the time is up."""
LINEAR_FROM = 1 << 20
"""Times grow with the size from here on; below, what does not depend on it counts more."""
BATCH_NBYTES = 256 << 10
"""Arrays up to this are measured several together, as many as fill it, at most `BATCH`."""
BATCH = 32
COST_ARRAYS = 20
"""The costs besides time are those of so many arrays …"""
COST_NBYTES = 512 << 10
"""… of this size: too large to be packed, but by `file_region`."""
MEMORY_SHARE = 4
"""A size is left out if it is more than 1/4 of what is free."""
FREE_SECONDS = 2.0
"""How long memory may take to come back; it takes a millisecond."""


def strategy_bench(
    session: Session | None = None,
    *,
    strategies: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
) -> StrategyFigures:
    """Measure what sharing strategies cost here, on rank 0 of a session.

    The current strategy stays as it is, and nothing is left behind, also after an interrupt.  Other ranks do
    nothing.  Memory that was kept for the next arrays is freed.

    Parameters
    ----------
    session : Session, optional
        Its rank 0 takes the arrays; by default a session of one rank is started for this.
    strategies : sequence of str, optional
        Names; by default all that work here.
    sizes : sequence of int
        Bytes of an array, multiples of eight.
    seconds : float
        About how long it may take: sizes that would take longer are left out, and listed.

    Raises
    ------
    ValueError, StrategyUnavailableError
        A strategy does not exist, or does not work here; a size is no positive multiple of eight.
    KeyboardInterrupt
        It was interrupted.
    """
    chosen = tuple(get_all_sharing_strategies()) if strategies is None else tuple(strategies)
    for name in chosen:
        registry.find_strategy(name)
    if wrong := [size for size in sizes if size <= 0 or size % 8]:
        raise ValueError(f"sizes are positive multiples of 8 bytes, not {wrong[0]}")
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(Session(1)) if session is None else session
        return _Bench(used, chosen, time.monotonic() + seconds).figures(sorted(set(sizes)))


class _Bench:
    """One measurement."""

    def __init__(self, session: Session, strategies: Sequence[str], deadline: float) -> None:
        session.start()
        self._session, self._deadline = session, deadline
        self._strategies = list(strategies)
        self._store = current_store()
        self._left_out: list[str] = []

    def figures(self, sizes: Sequence[int]) -> StrategyFigures:
        load = os.getloadavg()[0]
        self._warm_up()
        costs = [cost for name in list(self._strategies) if (cost := self._cost(name)) is not None]
        times: list[StrategyTime] = []
        last = 0.0
        for at, nbytes in enumerate(sizes):
            free = min((limit.free for limit in memory_limits.limits()), default=None)
            growth = nbytes / sizes[at - 1] if at and sizes[at - 1] >= LINEAR_FROM else 4
            reason = self._reason_against(nbytes, free, last * growth if at else 0.0)
            if reason:
                left = ", ".join(size_text(size) for size in sizes[at:])
                self._left_out.append(f"left out: {left} ({reason})")
                break
            begin = time.monotonic()
            found, rounds = self._measure(nbytes, (self._deadline - begin) / (len(sizes) - at))
            times += found
            last = (time.monotonic() - begin) / rounds
        return StrategyFigures(
            tuple(times),
            tuple(costs),
            COST_ARRAYS,
            COST_NBYTES,
            tuple(self._left_out),
            load,
            usable_cpus(),
        )

    def _reason_against(self, nbytes: int, free: int | None, expected: float) -> str:
        if free is not None and nbytes * MEMORY_SHARE > free:
            return f"only {size_text(free)} of memory are free"
        left = max(0.0, self._deadline - time.monotonic())
        if expected > left:
            took = f"it would take about {expected:.1f} s, and {left:.1f} s are left"
            return f"{took}: --seconds allows more"
        return ""

    def _warm_up(self) -> None:
        """Run every line once: imports and first calls are no cost of a strategy."""
        for name in list(self._strategies):
            self._attempt(name, 1 << 10)

    def _measure(self, nbytes: int, seconds: float) -> tuple[list[StrategyTime], int]:
        """Return the medians of one size, and of how many rounds; strategies take turns."""
        runs: dict[str, list[Steps]] = {name: [] for name in self._strategies}
        end = time.monotonic() + seconds
        rounds = 0
        while rounds < RUNS:
            now = time.monotonic()
            if rounds and now >= (end if rounds >= FEWEST_RUNS else self._deadline):
                break
            rounds += 1
            for name in list(self._strategies):
                steps = self._attempt(name, nbytes)
                if steps is not None:
                    runs[name].append(steps)
        return [
            StrategyTime(name, nbytes, Steps(*map(statistics.median, zip(*steps, strict=True))), len(steps))
            for name, steps in runs.items()
            if steps
        ], rounds

    def _attempt(self, name: str, nbytes: int) -> Steps | None:
        """Return one run, or None if the strategy fails here, which ends it."""
        try:
            return self._run(name, nbytes)
        except (NbParallelError, OSError) as error:
            self._strategies.remove(name)
            self._left_out.append(f"{name} failed at {size_text(nbytes)}: {type(error).__name__}: {error}")
            return None

    def _run(self, name: str, nbytes: int) -> Steps:
        count = max(1, min(BATCH, BATCH_NBYTES // nbytes))
        with self._held() as held:
            clock = [time.perf_counter()]
            held.make(name, nbytes, count)
            clock.append(time.perf_counter())
            held.touch()
            clock.append(time.perf_counter())
            message = held.message(self._session.broker)
            clock.append(time.perf_counter())
            received = self._on_rank(message, count * nbytes)
            freed = time.perf_counter()
            self._free(held)
            freed = time.perf_counter() - freed
        allocate, touch, hand_over = (b - a for a, b in itertools.pairwise(clock))
        steps = (allocate, touch, hand_over, received.attach, received.read, freed)
        return Steps(*(seconds / count for seconds in steps))

    def _on_rank(self, data: bytes, nbytes: int) -> benchmark_probe.Received:
        received = self._session.call(benchmark_probe.receive, data)[0]
        expected = nbytes // 8 * 0x0101010101010101 % (1 << 64)
        if not isinstance(received, benchmark_probe.Received) or received.total % (1 << 64) != expected:
            raise InternalError(f"rank 0 did not read what the notebook wrote: {received}; please file a bug")
        return received

    @contextlib.contextmanager
    def _held(self) -> Iterator[BenchmarkArrays]:
        """Give a place for arrays, which are gone afterwards, whatever happens."""
        self._store.drain()
        self._store.trim()
        self._before = {record.segment for record in self._store.segments()}
        held = BenchmarkArrays()
        try:
            yield held
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # an interrupt may come where a frame has an array
            raise
        finally:
            self._free(held)

    def _free(self, held: BenchmarkArrays) -> None:
        """Release arrays, and wait until their memory is freed."""
        held.clear()
        deadline = time.monotonic() + FREE_SECONDS
        while True:
            self._store.drain()
            self._store.trim()
            if {record.segment for record in self._store.segments()} <= self._before:
                return
            if time.monotonic() >= deadline:
                return  # the user's code allocated at the same time, or a rank is slow: only a time is wrong
            time.sleep(0.0001)

    def _cost(self, name: str) -> StrategyCost | None:
        """Return what arrays cost besides time, or None if the strategy fails here, which ends it."""
        supervisor = self._session.statistics().supervisor_pid
        with self._held() as held:
            _settle(supervisor)
            before = (
                benchmark_probe.descriptors(),
                benchmark_probe.descriptors(supervisor),
                benchmark_probe.names(),
                self._memory(),
            )
            try:
                held.make(name, COST_NBYTES, COST_ARRAYS)
                held.touch()
                received = self._on_rank(held.message(self._session.broker), COST_NBYTES * COST_ARRAYS)
            except (NbParallelError, OSError) as error:
                self._strategies.remove(name)
                self._left_out.append(f"{name} failed: {type(error).__name__}: {error}")
                return None
            _settle(supervisor)  # it may have a file open for a moment
            after = (
                benchmark_probe.descriptors(),
                benchmark_probe.descriptors(supervisor),
                benchmark_probe.names(),
                self._memory(),
            )
        mine, theirs, names, nbytes = (b - a for a, b in zip(before, after, strict=True))
        if not registry.find_strategy(name).shares:
            nbytes += COST_NBYTES * COST_ARRAYS  # the notebook's own
        return StrategyCost(name, mine, received.descriptors, theirs, names, nbytes)

    def _memory(self) -> int:
        return sum(record.nbytes for record in self._store.segments() if record.phase != "pooled")


class BenchmarkArrays:
    """Arrays of one run; no variable of any other frame refers to them, which a traceback would keep."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._message: pickle_format.Pickled | None = None

    def make(self, name: str, nbytes: int, count: int) -> None:
        """Allocate arrays with a strategy."""
        shares = registry.find_strategy(name).shares
        for _ in range(count):
            if shares:
                self._arrays.append(current_store().empty(nbytes, np.uint8, strategy=name))
            else:
                self._arrays.append(np.empty(nbytes, np.uint8))

    def touch(self) -> None:
        """Write every byte."""
        for n in range(len(self._arrays)):
            self._arrays[n].fill(1)

    def message(self, broker: SegmentBroker) -> bytes:
        """Return what a rank needs to have them."""
        self._message = pickling.dumps(self._arrays, current_store(), broker=broker)
        return self._message.data

    def clear(self) -> None:
        """Release them."""
        self._message = None
        self._arrays.clear()


def _settle(supervisor: int) -> None:
    """Wait until the supervisor has handled all requests: its descriptors are counted."""
    deadline = time.monotonic() + FREE_SECONDS
    seen, same = benchmark_probe.descriptors(supervisor), 0
    while same < 5 and time.monotonic() < deadline:
        time.sleep(0.002)
        now = benchmark_probe.descriptors(supervisor)
        seen, same = now, same + 1 if now == seen else 0
