"""Cells on two hosts: start, an empty one, output, interrupts; beside one host, and Dask's own tasks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import nbparallel as nbp
from benchmarks.cluster.turns import HOSTS, RANKS, check, figure, take_turns, workers_of
from benchmarks.report import Section
from tests.cluster.dask_cluster import DaskProcesses

LINES_AIM, INTERRUPT_AIM = 1.5, 0.2
START_AIM, EMPTY_AIM = (3.3, "one host"), (0.74, "`client.submit` of 4 tasks")
"""1.5 s and 8 ms on the machine where they were set: one host started in 0.45 s there, and four tasks took
10.8 ms."""
LATENCY_AIM = 10e-3
"""On top of what one host takes."""
LINES = 10_000
TOPIC = "benchmark"
PRINT = "import time\nprint(time.monotonic())\ntime.sleep(0.15)"
"""The cell goes on: what ends it would push its output."""
SLEEP = "import time\ntime.sleep(60)"
WAIT = "import time\nbarrier() if rank else time.sleep(60)"


class Arrivals:
    """Takes output, and says how long it was on its way: its text is when it was printed."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def stream(self, rank: int, name: str, text: str) -> None:
        """Take what was printed."""
        now = time.monotonic()
        self.seconds += [now - float(line) for line in text.split()]

    def finish(self, *_: Any, **__: Any) -> None:
        """Ignore it, and whatever else comes."""

    display = result = clear = note = finish


def _started(make: Callable[[], nbp.Session]) -> float:
    began = time.perf_counter()
    with make() as session:
        session.run("pass")
        return time.perf_counter() - began


def _ran(session: nbp.Session, cell: str) -> float:
    began = time.perf_counter()
    session.run(cell)
    return time.perf_counter() - began


def _latency(session: nbp.Session) -> float:
    arrivals = Arrivals()
    session.run(PRINT, sink=arrivals)
    return statistics.fmean(arrivals.seconds)


def _interrupted(session: nbp.Session, cell: str) -> float:
    pending = session.submit(cell)
    time.sleep(0.3)
    began = time.perf_counter()
    pending.cancel()
    try:
        pending.result(20)
    except KeyboardInterrupt:
        return time.perf_counter() - began
    raise RuntimeError("the cell was not interrupted")


def _say(_: int) -> None:
    import distributed

    worker: Any = distributed.get_worker()  # type: ignore[no-untyped-call]
    worker.log_event(TOPIC, time.monotonic())
    time.sleep(0.15)


class _Dask:
    """What one would do with Dask alone; one task for each rank, on the same hosts."""

    def __init__(self, client: Any) -> None:
        self._client, self._workers = client, workers_of(client)
        self._said: list[float] = []
        client.subscribe_topic(TOPIC, lambda event: self._said.append(time.monotonic() - event[1]))

    def _perform(self, function: Callable[[int], Any]) -> list[Any]:
        futures = [
            self._client.submit(function, rank, workers=[self._workers[rank * 2 // RANKS]], pure=False)
            for rank in range(RANKS)
        ]
        return list(self._client.gather(futures))

    def empty(self) -> float:
        began = time.perf_counter()
        check(self._perform(int), range(RANKS))
        return time.perf_counter() - began

    def latency(self) -> float:
        self._said.clear()
        self._perform(_say)
        return statistics.fmean(self._said)


def run(*, quick: bool) -> Section:
    """Measure; a cell's results are checked first."""
    few, some, many = (3, 5, 20) if quick else (9, 15, 100)
    with DaskProcesses(HOSTS) as dask:
        started = take_turns({
            "hosts": lambda: _started(lambda: nbp.Session(cluster=dask.client)),
            "one host": lambda: _started(lambda: nbp.Session(RANKS)),
        }, few)  # fmt: skip
        theirs = _Dask(dask.client)
        with nbp.Session(cluster=dask.client) as hosts, nbp.Session(RANKS) as one:
            both = {"hosts": hosts, "one host": one}
            text = "".join(f"{number}\n" for number in range(LINES))
            for session in both.values():
                check(session.run("rank, all_reduce(rank)").values, [(rank, 6) for rank in range(RANKS)])
                result = session.run(f"for i in range({LINES}): print(i)")
                check([each.stdout for each in result], [text] * RANKS)

            def turns(
                call: Callable[..., float], *more: Any, rounds: int, **peers: Any
            ) -> dict[str, list[float]]:
                calls = {name: lambda session=session: call(session, *more) for name, session in both.items()}
                return take_turns({**calls, **peers}, rounds)

            empty = turns(_ran, "pass", rounds=many, **{"client.submit": theirs.empty})
            latency = turns(_latency, rounds=some, log_event=theirs.latency)
            lines = turns(_ran, f"for i in range({LINES}): print(i)", rounds=few)
            asleep = turns(_interrupted, SLEEP, rounds=few)
            waiting = turns(_interrupted, WAIT, rounds=few)
    middle = {name: statistics.median(times) for name, times in latency.items()}
    return Section(
        "Cells on two hosts",
        [
            figure("session on a running cluster, until its first cell has run", started["hosts"], None,
                   {"one host": started["one host"]}, times=START_AIM),
            figure("empty cell", empty["hosts"], None,
                   {"`client.submit` of 4 tasks": empty["client.submit"], "one host": empty["one host"]},
                   times=EMPTY_AIM),
            figure("output, from `print` to the notebook while the cell goes on", latency["hosts"],
                   middle["one host"] + LATENCY_AIM,
                   {"`log_event` of 4 tasks": latency["log_event"], "one host": latency["one host"]}),
            figure(f"4 × {LINES:,} lines", lines["hosts"], LINES_AIM, {"one host": lines["one host"]}),
            figure("interrupt in `sleep`", asleep["hosts"], INTERRUPT_AIM, {"one host": asleep["one host"]}),
            figure("interrupt in `barrier`, rank 0 in `sleep`", waiting["hosts"], INTERRUPT_AIM,
                   {"one host": waiting["one host"]}),
        ],
        "One host: the same number of ranks in a session of this machine. The aim for output is what one "
        "host takes and 10 ms. Those for the start and the empty cell are 1.5 s and 8 ms, as many times what "
        "their peer took on the machine where they were set.",
    )  # fmt: skip
