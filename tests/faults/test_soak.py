"""A day's work on one session: thousands of mixed cells, and nothing grows (G11)."""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session
from nbparallel.sharing import current_store
from nbparallel.sharing.lifecycle import exported_segments
from nbparallel.testing.waiting import wait_until

KEEP_SECONDS = 0.2
"""Memory that is kept for reuse goes back after this, so that it is not taken for growth."""
SETTLE_SECONDS = 1.0
BYTES_A_CELL = 1024
"""What a process may grow by: less than what one leaked object a cell would show."""
TRIM = "import ctypes; ctypes.CDLL(None).malloc_trim(0)"
"""Has malloc give back what it keeps: up to twice the largest block that was ever freed (mallopt(3))."""
SLACK_BYTES = 2 << 20
"""What malloc cannot give back, because blocks in use lie between."""
SLOWER = 1.5
"""How much longer a cell may take in the end; the goal is 1.2 on a quiet machine."""
MUCH_SLOWER = 4.0
"""The same where a median is of nine cells only: a few of them wait for the processor."""


@dataclass(frozen=True)
class Size:
    """What one process has."""

    nbytes: int
    """Anonymous memory in RAM."""
    files: int
    maps: int
    threads: int


def size_of(pid: int) -> Size:
    """Return what a process has now (proc_pid_status(5))."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    with open(f"/proc/{pid}/maps") as file:
        maps = len(file.readlines())
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Size(int(fields["RssAnon"].split()[0]) << 10, files, maps, int(fields["Threads"]))


class Day:
    """The cells of one day, drawn at random; every one is checked."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.names: dict[str, Any] = {}
        self.draw = random.Random(2880)
        self.total = 0

    def cell(self) -> None:
        """Run one cell."""
        self.total += 1
        kinds: dict[Callable[[], None], int] = {
            self.collectives: 30, self.messages: 10, self.share: 15, self.drop: 12, self.copied: 8,
            self.made_on_ranks: 10, self.output: 4, self.some: 4, self.in_python: 4, self.fails: 4,
            self.mismatch: 2, self.interrupted: 2, self.killed: 1,
        }  # fmt: skip
        self.draw.choices(list(kinds), list(kinds.values()))[0]()

    def run(self, source: str, expected: list[Any] | None = None) -> None:
        """Run a cell's source."""
        values = self.session.run(source, namespace=self.names).values
        assert expected is None or values == expected, source

    def fail(self, source: str) -> None:
        """Run a cell that fails."""
        with pytest.raises(ParallelError):
            self.run(source)

    def collectives(self) -> None:
        """Ranks combine numbers and arrays."""
        self.run(f"all_reduce(rank + {self.total})", [2 * self.total + 1] * 2)
        self.run("float(all_reduce(np.full(5000, 1.0)).sum())", [10_000.0] * 2)

    def messages(self) -> None:
        """Ranks send to each other, by value and without a copy."""
        self.run("w = isend(rank, 1 - rank); y = recv(src=1 - rank); w.wait(); y", [1, 0])
        if "x" in self.names:
            self.run("send(x, 1, view=True) if rank == 0 else float(recv(src=0).sum())")

    def share(self) -> None:
        """Give the notebook a new array; sometimes a small one, sometimes ranks may write to it."""
        name, length = self.draw.choice("xyz"), self.draw.choice([10, 5_000, 200_000])
        self.names[name] = np.full(length, float(self.total))
        share = [name] if self.draw.random() < 0.3 else []
        got = self.session.run(f"float({name}[-1])", namespace=self.names, share=share).values
        assert got == [float(self.total)] * 2

    def drop(self) -> None:
        """Delete one in the notebook."""
        if self.names:
            del self.names[self.draw.choice(list(self.names))]

    def copied(self) -> None:
        """Have a list travel as a copy."""
        self.names["table"] = list(range(self.draw.randrange(2_000)))
        self.run("len(table)", [len(self.names["table"])] * 2)

    def made_on_ranks(self) -> None:
        """Ranks make shared arrays, and let go of them."""
        self.run(
            "mine = [nbp.zeros(n) for n in (7, 3000, 90_000)]\nparts = all_gather(mine[1])\ndel mine, parts"
        )

    def output(self) -> None:
        """Ranks print."""
        self.run("for line in range(300): print(rank, line)")

    def some(self) -> None:
        """One of them works alone."""
        assert self.session.run("rank", ranks=[1]).values[1] == 1

    def in_python(self) -> None:
        """Functions and values go to and fro without a cell."""
        assert self.session.call(divmod, self.total, 7) == [divmod(self.total, 7)] * 2
        self.session.push(pushed=np.arange(self.draw.randrange(1, 50_000)))
        assert self.session.pull("pushed")[0][0] == 0

    def fails(self) -> None:
        """One raises, while the other waits."""
        self.fail("1 / rank\nbarrier()")

    def mismatch(self) -> None:
        """They call different operations."""
        self.fail("barrier() if rank else all_reduce(1)")

    def interrupted(self) -> None:
        """Stop a cell, as its user does."""
        pending = self.session.submit("import time; time.sleep(60)", namespace=self.names)
        pending.cancel()
        with pytest.raises(KeyboardInterrupt):
            pending.result()

    def killed(self) -> None:
        """Rank 1 is killed, in a cell or between cells."""
        if self.draw.random() < 0.5:
            os.kill(self.session.statistics().ranks[1].pid, signal.SIGKILL)
            wait_until(lambda: self.session.statistics().ranks[1].state == "dead")
        else:
            self.fail("import os, signal\nif rank: os.kill(os.getpid(), signal.SIGKILL)\nbarrier()")
        self.prepare()

    def prepare(self) -> None:
        """Have on every rank what cells use."""
        self.run(
            "import numpy as np, nbparallel.sharing.lifecycle.exported_segments as pool\n"
            f"pool.KEEP_SECONDS = {KEEP_SECONDS}\n"
            "if 'pushed' in globals(): del pushed"
        )

    def sizes(self) -> dict[str, Size]:
        """Return what each process has when it has let go of everything; rank 1 may have been replaced."""
        self.names.clear()
        self.prepare()
        self.run(f"import gc\ngc.collect()\n{TRIM}")
        gc.collect()
        current_store().drain()
        exec(TRIM)
        time.sleep(SETTLE_SECONDS)
        seen = self.session.statistics()
        assert seen.segments == (), "all memory was given back"
        return {
            "this process": size_of(os.getpid()),
            "the supervisor": size_of(seen.supervisor_pid),
            "the template": size_of(seen.template_pid),
            "rank 0": size_of(seen.ranks[0].pid),
        }


@pytest.mark.once
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize(
    "cells", [pytest.param(120, marks=pytest.mark.slow), pytest.param(2880, marks=pytest.mark.stress)]
)
def test_nothing_grows_over_a_day(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell every half minute of a day: memory, open files, mappings, threads stay; so does the pace."""
    monkeypatch.setattr(exported_segments, "KEEP_SECONDS", KEEP_SECONDS)
    times = []
    with Session(2) as session:
        day = Day(session)
        day.prepare()
        for _ in range(cells // 4):
            day.cell()
        before = day.sizes()
        for _ in range(cells - cells // 4):
            day.cell()
            begun = time.perf_counter()
            day.run("barrier()")
            times.append(time.perf_counter() - begun)
        after = day.sizes()
    grown = []
    for who, now in after.items():
        was = before[who]
        if now.nbytes > was.nbytes + BYTES_A_CELL * len(times) + SLACK_BYTES:
            grown.append(f"{who}: {was.nbytes} bytes, then {now.nbytes}")
        if now.files > was.files + 3 or now.threads > was.threads or now.maps > was.maps + 64:
            grown.append(f"{who}: {was}, then {now}")
    assert not grown, grown
    tenth = len(times) // 10
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    print(f"{cells} cells; before {before}, after {after}; a cell took {first:.4f} s, then {last:.4f} s")
    assert last < (SLOWER if cells > 1000 else MUCH_SLOWER) * first, (first, last)
