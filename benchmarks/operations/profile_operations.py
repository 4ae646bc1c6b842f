"""Where the time of operations goes: small ones by their parts, others by what processors and memory allow.

python -m benchmarks.operations.profile_operations [--quick] [--no-strace]
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.adapters import Ours
from benchmarks.operations.lines import KIB, LARGE, MIB, Line, case
from benchmarks.operations.parts import Seconds, parts_of_all_reduce, parts_of_ping_pong
from benchmarks.report import Section, human_seconds
from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of, run_ranks

SMALL: dict[str, tuple[int, Callable[[Communicator], Seconds]]] = {
    "all_reduce, 8 B, 2 ranks": (2, parts_of_all_reduce),
    "all_reduce, 8 B, 4 ranks": (4, parts_of_all_reduce),
    "ping-pong, 8 B, one way": (2, parts_of_ping_pong),
}
MOVED = ("send", "broadcast", "gather", "scatter", "all_to_all", "all_reduce")
BETWEEN = (
    *(Line("all_reduce", nbytes) for nbytes in (64 * KIB, MIB, 16 * MIB, LARGE)),
    Line("all_to_all", KIB, view=True),
)
BATCH = 200
"""Calls of a small operation in one round."""
OTHERS = ("pselect6", "select", "poll", "total")
"""Not of the ranks, but of the process that waits for their end."""
CALLS = 2000
"""Of a small operation under strace; twice as many in a second run: the difference is theirs alone."""
NOTES = """\
**Small operations.** *Alone*: processor time on one rank if the others are always on time (the benchmark
writes into the control segment what they would), and of that what its parts take by themselves: numpy's
calls, words and bytes of the control segment, fences, the line of the cell; the rest is Python's bytecode
and calls. *Together*: between the ranks. What is between the two is handing over: a word that another core
has written comes from its cache, a rank that waits sees it at its next look, and with more ranks than
cores a rank has to be put on a core first. Yields and sleeps are counted for each call of each rank. For a
message *alone* is what the sender does and then the receiver.

**In between.** *numpy alone*: the additions and copies that a rank makes of its part, by a rank alone whose
arrays lie in its own cache. *All ranks / cores*: processor time of all ranks together, by the number of
cores: no sooner can all be done. Near *time*, nothing is waited for: what is more than numpy's are bytes that
come from another core's cache, and Python.

**Large operations.** *Has to move*: the bytes that the busiest rank must read and write if every byte is
copied once. *Limit*: how long that takes at the speed measured in the same run, of one rank alone where
only one has work (the root of gather and scatter), else of all together. *Share*: limit / time. Near
1 no library that copies with these cores is quicker. Private arrays go through chunks in the cache, a second
copy that another core does at the same time, if there is one."""


def time_alone(ranks: int, parts: Callable[[Communicator], Seconds]) -> Seconds:
    """Time the parts of an operation on rank 0, which plays all ranks."""
    ready, end = os.pipe(), os.pipe()

    def work(c: Communicator) -> Seconds:
        if c.rank:
            os.write(ready[1], b"x")  # it has looked at the words as they were
            os.read(end[0], 1)  # rank 0 plays all ranks until then
            return {}
        for _ in range(1, ranks):
            os.read(ready[0], 1)
        try:
            return parts(c)
        finally:
            os.write(end[1], b"x" * ranks)

    try:
        return _values(ranks, work)[0]  # type: ignore[no-any-return]
    finally:
        for fd in (*ready, *end):
            os.close(fd)


def _values(ranks: int, work: Callable[[Communicator], Any]) -> list[Any]:
    outcomes = run_ranks(ranks, work, seconds=300)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def _small_call(c: Communicator, name: str) -> tuple[Callable[[], object], int]:
    """Return a small operation, and how many ways it goes."""
    x = np.zeros(1)
    if name.startswith("all_reduce"):
        return lambda: c.all_reduce(x), 1
    return Ours(c, shared=False).ping_pong(x), 2


def time_together(c: Communicator, name: str, rounds: int) -> dict[str, float]:
    """Return what one call takes between ranks, and how often it gave its processor away."""
    call, ways = _small_call(c, name)
    walls, used = [], []
    for _ in range(rounds):
        c.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(BATCH):
            call()
        walls.append((time.perf_counter() - began) / BATCH / ways)
        used.append((time.process_time() - cpu) / BATCH / ways)
    found = {"wall": statistics.median(walls), "cpu": statistics.median(used)}
    waiter, yielded, slept = context_of(c).waiter, [0], [0]
    sched_yield, sleep = os.sched_yield, waiter.futex_wait

    def counted_yield() -> None:
        yielded[0] += 1
        sched_yield()

    def counted_sleep(*arguments: Any) -> None:
        slept[0] += 1
        sleep(*arguments)

    os.sched_yield, waiter.futex_wait = counted_yield, counted_sleep  # type: ignore[method-assign]
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(BATCH * rounds):
        call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    os.sched_yield = sched_yield
    del waiter.futex_wait
    calls = BATCH * rounds * ways
    found["yields"], found["sleeps"] = yielded[0] / calls, slept[0] / calls
    found["given"] = (after.ru_nvcsw - before.ru_nvcsw) / calls
    found["taken"] = (after.ru_nivcsw - before.ru_nivcsw) / calls
    return found


def _system_calls(name: str) -> str:
    """Return which system calls one call of a small operation makes, as strace counts them on all ranks."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    counts = []
    for times in (1, 2):
        command = [
            "strace", "-f", "-c", "-U", "calls,name", sys.executable, "-m",
            "benchmarks.operations.profile_operations",
            "--bare", name, "--calls", str(times * CALLS),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        rows = re.findall(r"^\s*(\d+)\s+(\w+)$", done.stderr, re.MULTILINE)
        if done.returncode or not rows:
            return f"strace failed: {done.stderr.strip().splitlines()[-1:]}"
        counts.append({what: int(count) for count, what in rows if what not in OTHERS})
    few, many = counts
    ranks = SMALL[name][0]
    each = {what: (many[what] - few.get(what, 0)) / CALLS / ranks for what in many}
    return ", ".join(f"{what} {count:.2f}" for what, count in each.items() if count >= 0.01) or "none"


def small(*, quick: bool, strace: bool) -> str:
    """Return the table of small operations."""
    head = [
        "", "alone", "numpy", "words, bytes", "fences", "line", "Python", "together", "processor time",
        "handing over", "yields", "sleeps", "switches", *(["system calls (strace)"] if strace else []),
    ]  # fmt: skip
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, (ranks, parts) in SMALL.items():
        alone = time_alone(ranks, parts)
        runs = _values(ranks, lambda c, name=name: time_together(c, name, 10 if quick else 50))
        most = {key: max(run[key] for run in runs) for key in runs[0]}
        known = [alone[key] for key in ("numpy", "words", "fence", "line")]
        cells = [human_seconds(t) for t in (alone["whole"], *known, alone["whole"] - sum(known))]
        cells += [human_seconds(most["wall"]), human_seconds(most["cpu"])]
        cells += [human_seconds(most["wall"] - alone["whole"])]
        cells += [f"{most['yields']:.2f}", f"{most['sleeps']:.3f}", f"{most['given'] + most['taken']:.3f}"]
        cells += [_system_calls(name)] if strace else []
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def bare(name: str, calls: int) -> None:
    """Do nothing but call a small operation: for strace."""

    def work(c: Communicator) -> None:
        call, _ = _small_call(c, name)
        for _ in range(calls):
            call()

    _values(SMALL[name][0], work)


def has_to_move(operation: str, ranks: int, *, shared: bool) -> tuple[float, bool]:
    """Return bytes read and written by the busiest rank, per byte of the array; whether it works alone."""
    part = 1 / ranks
    if operation == "scatter":
        return (2 * part, False) if shared else (2.0, True)
    if operation == "gather":
        return 2.0, True
    if operation == "all_reduce" and not shared:  # others' parts into the cache, the sum, the other sums
        return 3 * part * (ranks - 1) + 2 * part, False
    if operation == "broadcast" and shared:
        return 2 * part * (ranks - 1), False
    return 2.0, operation == "send"


def _large(c: Communicator, rounds: int) -> dict[tuple[str, bool], tuple[float, float, int]]:
    """Return wall and processor seconds and page faults of large operations: medians on this rank."""
    found = {}
    for operation in MOVED if c.world_size == 2 else MOVED[1:]:
        for shared in (True, False):
            made = case(Ours(c, shared=shared), Line(operation, LARGE))
            assert made is not None, "nbparallel has all of them"
            for _ in range(3):
                made.call()
            each = []
            for _ in range(rounds):
                c.barrier()
                faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                began, cpu = time.perf_counter(), time.process_time()
                made.call()
                wall, used = time.perf_counter() - began, time.process_time() - cpu
                each.append((wall, used, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
            found[operation, shared] = tuple(statistics.median(row) for row in zip(*each, strict=True))
    return found  # type: ignore[return-value]


def _copy_seconds(c: Communicator, rounds: int) -> tuple[float, float]:
    """Return how long a copy of 64 MB takes if all ranks copy, and if rank 0 does alone."""
    a, b = np.ones(LARGE // 4, np.float32), np.ones(LARGE // 4, np.float32)
    times: dict[bool, list[float]] = {True: [], False: []}
    for together in (True, False) * rounds:
        c.barrier()
        began = time.perf_counter()
        if together or c.rank == 0:
            np.copyto(a, b)
        times[together].append(time.perf_counter() - began)
        if c.rank == 0:
            for rank in range(1, c.world_size):
                c.send(0, rank)
        else:
            c.recv(src=0)
    return statistics.median(times[True]), statistics.median(times[False])


def large(ranks: int, *, rounds: int) -> str:
    """Return the table of large operations."""

    def work(c: Communicator) -> Any:
        return _copy_seconds(c, rounds), _large(c, rounds)

    values = _values(ranks, work)
    together, alone = max(value[0][0] for value in values), values[0][0][1]
    rows = [
        f"{ranks} ranks; a copy of 64 MB takes one rank {human_seconds(alone)} alone, and "
        f"{human_seconds(together)} while all copy.\n",
        "| 64 MB | time | processor time, busiest | page faults, most | has to move | limit | share |",
        "|" + "---|" * 7,
    ]
    for key in values[0][1]:
        operation, shared = key
        wall, cpu, faults = (max(value[1][key][i] for value in values) for i in range(3))
        share, by_one = has_to_move(operation, ranks, shared=shared)
        limit = share / 2 * (alone if by_one else together)
        rows.append(
            f"| {operation}, {'shared' if shared else 'private'} | {human_seconds(wall)} "
            f"| {human_seconds(cpu)} | {faults:.0f} | {share * LARGE / (1 << 20):.0f} MB "
            f"| {human_seconds(limit)} | {limit / wall:.2f} |"
        )
    return "\n".join(rows)


def _numpy_alone(c: Communicator, line: Line, *, shared: bool) -> float:
    """Return what additions and copies of one rank's part of an all_reduce take, hot."""
    count = line.nbytes // 4
    mine, theirs, own = (np.zeros(count, np.float32) for _ in range(3))
    part = slice(0, count // c.world_size)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(c.world_size - 1):
            np.add(mine[part], theirs[part], out=mine[part])
        if not shared:  # what others combine goes in, and all that was combined comes out
            own[part.stop :] = mine[part.stop :]
            mine[...] = own
        elif line.nbytes > 64 * KIB:
            for _ in range(c.world_size - 1):
                theirs[part] = mine[part]
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _in_between(c: Communicator, rounds: int) -> dict[tuple[str, bool], tuple[float, float, float]]:
    """Return wall and processor seconds of a call on this rank, and numpy's alone."""
    found = {}
    for line in BETWEEN:
        for shared in (True,) if line.view else (True, False):
            made = case(Ours(c, shared=shared), line)
            assert made is not None, "nbparallel has all of them"
            calls = max(1, min(BATCH, (4 * MIB) // line.nbytes))
            each = []
            for turn in range(rounds + 1):
                if made.array is not None:
                    made.array[...] = 0  # and stays 0, however often it is summed
                c.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    made.call()
                wall, used = (time.perf_counter() - began) / calls, (time.process_time() - cpu) / calls
                if turn:
                    each.append((wall, used))
            alone = 0.0
            if not line.view and c.rank == 0:
                alone = _numpy_alone(c, line, shared=shared)
            c.barrier()
            wall, used = (statistics.median(row) for row in zip(*each, strict=True))
            found[line.title, shared] = (wall, used, alone)
    return found


def in_between(ranks: int, *, rounds: int) -> str:
    """Return the table of operations between small and large."""
    values = _values(ranks, lambda c: _in_between(c, rounds))
    cores = min(ranks, len(os.sched_getaffinity(0)))
    rows = [
        f"| {ranks} ranks | time | numpy alone | processor time of a rank | all ranks / cores |",
        "|" + "---|" * 5,
    ]
    for key in values[0]:
        name, shared = key
        wall, used = max(value[key][0] for value in values), [value[key][1] for value in values]
        alone = values[0][key][2]
        rows.append(
            f"| {name}, {'shared' if shared else 'private'} | {human_seconds(wall)} "
            f"| {human_seconds(alone) if alone else '–'} | {human_seconds(max(used))} "
            f"| {human_seconds(sum(used) / cores)} |"
        )
    return "\n".join(rows)


def run(*, quick: bool, strace: bool = True) -> Section:
    """Profile small operations, and large ones on 2 and 4 ranks."""
    tables = [
        small(quick=quick, strace=strace),
        *(in_between(ranks, rounds=5 if quick else 15) for ranks in (2, 4)),
        *(large(ranks, rounds=5 if quick else 15) for ranks in (2, 4)),
    ]
    return Section("Where the time of operations goes", (), NOTES, "\n\n".join(tables))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; figures are rough")
    parser.add_argument("--no-strace", action="store_true", help="do not count system calls")
    parser.add_argument("--bare", choices=SMALL, help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, default=CALLS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.bare:
        bare(options.bare, options.calls)
        return
    section = run(quick=options.quick, strace=not options.no_strace)
    print(f"## {section.title}\n\n{section.table}\n\n{section.notes}")


if __name__ == "__main__":
    main()
