"""Data races: how long the notebook compares what ranks have recorded, in the two programs with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from benchmarks.report import Figure, Section, human_seconds, spread
from nbparallel.distributed.races.access_log import (
    READ,
    WRITE,
    AccessLog,
    Acquire,
    ArrayName,
    Box,
    MemoryAccess,
    Publish,
    Site,
)
from nbparallel.distributed.races.report import compare

RANKS = 2
ROWS, COLUMNS = 512, 256
STEPS, TURNS = 5_000, 8_000
JACOBI_LIMIT, LOCK_LIMIT = 0.5, 0.2
"""Seconds."""

SITE = Site("", 3)
Events = list[Publish | Acquire]


def _rows(first: int, stop: int) -> Box:
    """Return rows of a matrix of float64."""
    return Box(first * COLUMNS * 8, (stop - first, COLUMNS), (COLUMNS * 8, 8), 8)


def _barrier(events: Events, rank: int, number: int) -> None:
    keys = tuple(("collective", tuple(range(RANKS)), "", number, member) for member in range(RANKS))
    events += [Publish(keys[rank]), Acquire(keys)]


def jacobi_logs(steps: int) -> list[AccessLog]:
    """Return the logs of ranks that own half of two matrices each: read with the halo, write, exchange, wait.

    In each step a rank also sends its edge to its neighbour and receives the other's.
    """
    sites = tuple(Site("", line) for line in (4, 5, 6, 7))
    half = ROWS // RANKS
    logs = []
    for rank in range(RANKS):
        events: Events = []
        accesses = []
        low, high = rank * half, (rank + 1) * half
        other = 1 - rank
        for step in range(steps):
            old, new = (1, 2) if step % 2 == 0 else (2, 1)
            accesses += [
                MemoryAccess(len(events), old, sites[0], READ, _rows(max(low - 1, 0), min(high + 1, ROWS))),
                MemoryAccess(len(events), old, sites[1], READ, _rows(low, high)),
                MemoryAccess(len(events), new, sites[2], WRITE, _rows(low, high)),
                MemoryAccess(
                    len(events),
                    new,
                    sites[3],
                    READ,
                    _rows(high - 1, high) if rank == 0 else _rows(low, low + 1),
                ),
            ]
            events += [
                Publish(("message", rank, other, 0, 0, step + 1)),
                Acquire((("message", other, rank, 0, 0, step + 1),)),
            ]
            _barrier(events, rank, step + 1)
        logs.append(AccessLog(rank, tuple(events), tuple(accesses), _names(), len(accesses)))
    return logs


def lock_logs(turns: int) -> list[AccessLog]:
    """Return the logs of ranks that add to one counter, `turns` times in all, one after the other."""
    logs = []
    for rank in range(RANKS):
        events: Events = []
        accesses = []
        for turn in range(turns // RANKS):
            taken_ns = 1_000 * (turn * RANKS + rank)
            events.append(Acquire((("turn", "lock", "", rank, turn + 1, taken_ns),)))
            counter = Box(0, (1,), (8,), 8)
            value = (turn * RANKS + rank + 1).to_bytes(8, "little")
            accesses += [
                MemoryAccess(len(events), 1, SITE, READ, counter),
                MemoryAccess(len(events), 1, SITE, WRITE, counter, value),
            ]
            events.append(Publish(("lock", "", rank, turn + 1)))
        names = (ArrayName("counter", 1, 0, (1,), (8,), 8),)
        logs.append(AccessLog(rank, tuple(events), tuple(accesses), names, len(accesses)))
    return logs


def _names() -> tuple[ArrayName, ...]:
    return tuple(
        ArrayName(name, segment, 0, (ROWS, COLUMNS), (COLUMNS * 8, 8), 8)
        for segment, name in ((1, "grid"), (2, "new"))
    )


def _seconds(logs: Sequence[AccessLog], rounds: int) -> list[float]:
    """Return the times of some comparisons, each of which finds no race."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        report = compare(logs)
        times.append(time.perf_counter() - started)
        if report.races or report.accesses != sum(len(log.accesses) for log in logs):
            raise AssertionError(f"no race was expected: {report}")
    return times


def run(*, quick: bool) -> Section:
    """Measure both."""
    rounds = 3 if quick else 9
    cases: tuple[tuple[str, Callable[[int], list[AccessLog]], int, float], ...] = (
        (
            f"{STEPS} Jacobi steps of {RANKS} ranks: halo, messages and barrier each",
            jacobi_logs,
            STEPS,
            JACOBI_LIMIT,
        ),
        (f"{TURNS} turns of a lock around `counter[0] += 1`, {RANKS} ranks", lock_logs, TURNS, LOCK_LIMIT),
    )
    figures = []
    for what, make, count, limit in cases:
        times = _seconds(make(count), rounds)
        met = sorted(times)[rounds // 2] <= limit
        figures.append(Figure(what, spread(times), aim=f"≤ {human_seconds(limit)}", met=met))
    return Section(
        "Data races",
        figures,
        "What ranks have recorded is compared in the notebook, after the cell; idle otherwise.",
    )
