"""Timing of lines on one rank: results first, then the contenders in turns.  Runs under MPI too."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.operations.lines import Adapter, Case, Line, case

Times = dict[str, dict[str, list[float]]]
"""Line -> contender -> seconds per call on this rank, one for each round."""
BATCH_SECONDS = 0.02
"""About how long one round of one contender takes."""
ROUNDS = (3, 25)


def measure(contenders: Mapping[str, Adapter], lines: Sequence[Line], meet: Adapter, seconds: float) -> Times:
    """Measure on one rank.

    Parameters
    ----------
    meet : Adapter
        By which the ranks agree how often, and begin together.
    seconds : float
        For each line and contender.
    """
    found: Times = {}
    for line in lines:
        cases: dict[str, Case] = {}
        for name, adapter in contenders.items():
            made = case(adapter, line)
            if made is None:
                continue
            made.call()
            if meet.agree(0.0 if made.verify() else 1.0):
                raise AssertionError(f"{name}: {line.key} is wrong on rank {adapter.rank} or another one")
            if made.array is not None:
                made.array[...] = 0  # and stays 0, however often it is summed
            cases[name] = made
        if cases:
            found[line.key] = _take_turns(cases, line, meet, seconds)
    return found


def _take_turns(cases: dict[str, Case], line: Line, meet: Adapter, seconds: float) -> dict[str, list[float]]:
    barrier = meet.barrier()
    halves = 2 if line.operation == "ping-pong" else 1
    time_it = _dirty if line.dirty else _hot
    iterations, spent = {}, 0.0
    for name, made in cases.items():
        time_it(made, barrier, 1)
        once = meet.agree(time_it(made, barrier, 3))
        iterations[name] = max(1, min(5000, int(BATCH_SECONDS / once)))
        spent += iterations[name] * once
    low, high = ROUNDS
    rounds = int(meet.agree(max(low, min(high, int(seconds * len(cases) / max(spent, 1e-6))))))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, made in cases.items():
            times[name].append(time_it(made, barrier, iterations[name]) / halves)
    return times


def _hot(made: Case, barrier: Callable[[], Any], iterations: int) -> float:
    call = made.call
    barrier()
    begin = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - begin) / iterations


def _dirty(made: Case, barrier: Callable[[], Any], iterations: int) -> float:
    spent, call, array = 0.0, made.call, made.array
    for _ in range(iterations):
        array[...] = 0
        barrier()
        begin = time.perf_counter()
        call()
        spent += time.perf_counter() - begin
        array.sum()
    return spent / iterations
