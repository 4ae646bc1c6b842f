"""Messages: 64 MB and a small dictionary, beside torch, the library and joblib.

python -m benchmarks.multiprocessing.messages [--rounds N]
"""

from __future__ import annotations

import importlib.util
import multiprocessing as library
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import nbparallel as nbp
import nbparallel.multiprocessing as mp
from benchmarks.multiprocessing.launches import (
    beside,
    command_line,
    medians_of_launches,
    medians_of_turns,
)
from benchmarks.report import Figure, Section, installed

NBYTES = 64 * 10**6
MODULE = "benchmarks.multiprocessing.messages"
DIFFERENT = 251
"""Values of an array's elements: each message has another."""
SMALL = {"step": 17, "name": "a message of about a hundred bytes", "loss": 0.25, "more": [1, 2, 3]}
SMALL_MESSAGES = 200
"""Sent and acknowledged one after the other; their mean is one figure."""
SHARED_MESSAGES = 20
"""Likewise, of an array that is shared already: one alone would show what the contender before left cold."""
CALLS_AT_FIRST = 2
SIZES = {"64 KB": 64 * 10**3, "64 MB": NBYTES, "1 GB": 10**9}
"""Of shared arrays that are sent again: none is copied, so that all take as long."""
TORCH = importlib.util.find_spec("torch") is not None
JOBLIB = installed("joblib")


def _receive(take: Callable[[], Any], acknowledge: Any) -> None:
    """Take messages until None; the answer is the last byte, which shows that all of it came."""
    while (message := take()) is not None:
        acknowledge.send(message["step"] if isinstance(message, dict) else int(message[-1]))
        del message


class Line:
    """A consumer process, and the way to it.

    Parameters
    ----------
    module : module
        Of which queues, pipes and processes are.
    carrier : str
        ``"Queue"`` or ``"Pipe"``.
    """

    def __init__(self, module: Any, carrier: str) -> None:
        context = module.get_context("fork")
        self._answers, acknowledge = library.Pipe(duplex=False)
        if carrier == "Queue":
            queue = context.Queue()
            self._put, take = queue.put, queue.get
        else:
            reader, writer = context.Pipe(duplex=False)
            self._put, take = writer.send, reader.recv
        self._process = context.Process(target=_receive, args=(take, acknowledge), daemon=True)
        self._process.start()
        acknowledge.close()

    def send(self, message: Any, expected: int) -> None:
        """Send it, and wait until the consumer has it."""
        self._put(message)
        if self._answers.recv() != expected:
            raise AssertionError("another message arrived")

    def close(self) -> None:
        """End the consumer."""
        self._put(None)
        self._process.join()


def _last_byte(array: Any) -> int:
    return int(array[-1])


def _private(line: Line) -> Callable[[int], float]:
    def call(turn: int) -> float:
        value = turn % DIFFERENT
        array = np.full(NBYTES, value, np.uint8)
        began = time.perf_counter()
        line.send(array, value)
        return time.perf_counter() - began

    return call


def _again(line: Line, array: Any) -> Callable[[int], float]:
    def call(turn: int) -> float:
        value = turn % DIFFERENT
        array[-1] = value
        began = time.perf_counter()
        for _ in range(SHARED_MESSAGES):
            line.send(array, value)
        return (time.perf_counter() - began) / SHARED_MESSAGES

    return call


def _small(line: Line) -> Callable[[int], float]:
    def call(turn: int) -> float:
        del turn
        began = time.perf_counter()
        for _ in range(SMALL_MESSAGES):
            line.send(SMALL, 17)
        return (time.perf_counter() - began) / SMALL_MESSAGES

    return call


def _torch_contenders(lines: list[Line]) -> dict[str, Callable[[int], float]]:
    import torch
    import torch.multiprocessing as of_torch

    def under(strategy: str, call: Callable[[int], float]) -> Callable[[int], float]:
        def switched(turn: int) -> float:
            of_torch.set_sharing_strategy(strategy)
            return call(turn)

        return switched

    def fresh(line: Line) -> Callable[[int], float]:
        def call(turn: int) -> float:
            value = turn % DIFFERENT
            tensor = torch.full((NBYTES,), value, dtype=torch.uint8)
            began = time.perf_counter()
            line.send(tensor, value)
            return time.perf_counter() - began

        return call

    found = {}
    for strategy in ("file_descriptor", "file_system"):
        of_torch.set_sharing_strategy(strategy)
        lines.append(line := Line(of_torch, "Queue"))
        found[f"private torch {strategy}"] = under(strategy, fresh(line))
        shared = torch.zeros(NBYTES, dtype=torch.uint8).share_memory_()
        found[f"shared torch {strategy}"] = under(strategy, _again(line, shared))
    return found


def _joblib_contender() -> Callable[[int], float]:
    from joblib import Parallel, delayed

    def call(turn: int) -> float:
        value = turn % DIFFERENT
        array = np.full(NBYTES, value, np.uint8)
        began = time.perf_counter()
        (found,) = Parallel(n_jobs=2)([delayed(_last_byte)(array)])
        if found != value:
            raise AssertionError("another array arrived")
        return time.perf_counter() - began

    return call


def _copy() -> Callable[[int], float]:
    target = np.ones(NBYTES, np.uint8)

    def call(turn: int) -> float:
        array = np.full(NBYTES, turn % DIFFERENT, np.uint8)
        began = time.perf_counter()
        np.copyto(target, array)
        return time.perf_counter() - began

    return call


def launched(rounds: int) -> dict[str, float]:
    """Measure everything in this interpreter; return seconds by name."""
    queue, pipe = Line(mp, "Queue"), Line(mp, "Pipe")
    theirs, their_pipe = Line(library, "Queue"), Line(library, "Pipe")
    lines = [queue, pipe, theirs, their_pipe]
    shared = {name: nbp.zeros(nbytes, "u1") for name, nbytes in SIZES.items()}
    contenders = {
        "copy": _copy(),
        "private Queue": _private(queue),
        "private Pipe": _private(pipe),
        "private multiprocessing Queue": _private(theirs),
        "private multiprocessing Pipe": _private(their_pipe),
        **{f"shared {name}": _again(queue, array) for name, array in shared.items()},
        "small": _small(queue),
        "small multiprocessing": _small(theirs),
    }
    if TORCH:
        contenders |= _torch_contenders(lines)
    if JOBLIB:
        contenders["private joblib"] = _joblib_contender()
    try:
        return medians_of_turns(contenders, rounds, uncounted=CALLS_AT_FIRST)
    finally:
        for line in lines:
            line.close()


def rows(found: dict[str, float]) -> list[Figure]:
    """Return the rows of what was measured."""
    table = []
    strategies = ("file_descriptor", "file_system")
    for carrier in ("Queue", "Pipe"):
        what, ours = f"private 64 MB, {carrier}", f"private {carrier}"
        table.append(beside(what, found, ours, ("copy", "one copy"), "≤ 2.5 copies", 1 / 2.5))
        peer = (f"private multiprocessing {carrier}", f"multiprocessing, {carrier}")
        table.append(beside(what, found, ours, peer, "10 × multiprocessing", 10))
        for strategy in strategies:
            torch = (f"private torch {strategy}", f"torch, {strategy}")
            table.append(beside(what, found, ours, torch, "3 × torch", 3))
        table.append(beside(what, found, ours, ("private joblib", "joblib"), "5 × joblib", 5))
    for strategy, aim, least in zip(strategies, ("not slower", "≤ 2 ×"), (1.0, 0.5), strict=True):
        torch = (f"shared torch {strategy}", f"torch, {strategy}")
        table.append(beside("shared 64 MB again, Queue", found, "shared 64 MB", torch, aim, least))
    for size in ("64 MB", "1 GB"):
        little = ("shared 64 KB", "64 KB, ours")
        table.append(
            beside(f"shared {size} again, Queue", found, f"shared {size}", little, "≤ 1.2 ×", 1 / 1.2)
        )
    small = ("small multiprocessing", "multiprocessing")
    table.append(beside("100-byte dict, Queue", found, "small", small, "≤ 1.3 ×", 1 / 1.3))
    return table


def run(*, quick: bool) -> Section:
    """Measure in several interpreters, one after the other."""
    rounds, launches = (3, 1) if quick else (9, 5)
    found = medians_of_launches(MODULE, launches, "--launch", "--rounds", str(rounds))
    return Section(
        "Messages of processes",
        rows(found),
        f"From `put` or `send` until the consumer has acknowledged the last byte. Medians of {launches} "
        f"launches with {rounds} rounds each, all taking turns. A private array or tensor is a new one each "
        "time; joblib runs one task that has it as its argument.",
    )


def main() -> None:
    """Print the figures of one launch: with ``--launch`` as JSON."""
    command_line(__doc__, MODULE, launched, rows, rounds=5)


if __name__ == "__main__":
    main()
