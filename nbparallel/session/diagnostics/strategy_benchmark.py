"""Measuring sharing strategies: the same array through each of them, on a real rank, as one table.

Attached arrays are the same pages of memory with every strategy, so computing with them takes the same time;
strategies differ in allocating, finding and freeing.
All memory is fresh: the pool is emptied before each run.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbparallel.errors import InternalError, NbParallelError
from nbparallel.errors.text.table import Table
from nbparallel.session.session import Session
from nbparallel.sharing import current_store, get_all_sharing_strategies
from nbparallel.sharing.memory import memory_limits
from nbparallel.sharing.strategies import registry
from nbparallel.transfer import benchmark_probe, pickle_format, pickling
from nbparallel.wire.units import seconds_text, size_text

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
