"""The first sharing of a 64 MB array: into fresh memory, into the warm pool, and ahead in the background."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from benchmarks.report import Figure, Section, median_seconds, spread
from nbparallel.sharing import Store

SIZE = 8_000_000
"""float64: 64 MB."""
AIM_WARM = 1.3
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Advice to madvise(2), Linux 5.14; not in Python's `mmap`."""


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Ways:
    """The ways to bring an array into shared memory; each leaves nothing behind."""

    def __init__(self) -> None:
        self.source = np.arange(SIZE, dtype=float)
        self.private = np.zeros(SIZE)
        self.store = Store(pool_nbytes=1 << 30)
        self.times: dict[str, list[float]] = {}

    def note(self, name: str, call: Callable[[], object]) -> None:
        """Time a call under a name."""
        self.times.setdefault(name, []).append(_timed(call))

    def copy(self) -> None:
        """Copy once into touched memory, as numpy does."""
        self.note("copy", lambda: np.copyto(self.private, self.source))

    def fresh(self) -> None:
        """Share with an empty pool."""
        self.store.drain()
        self.store.trim()
        self.note("fresh", lambda: self.store.share(self.source))

    def warm(self) -> None:
        """Share with a segment of this size in the pool: the first time after it was made, and then."""
        for name in ("second", "warm"):
            self.store.drain()
            self.note(name, lambda: self.store.share(self.source))
        self.store.drain()

    def ahead(self) -> None:
        """Populate memory in a thread while this one computes; then copy into it."""
        fd = os.memfd_create("populated-ahead")
        nbytes = self.source.nbytes
        began = time.perf_counter()
        thread = threading.Thread(target=os.posix_fallocate, args=(fd, 0, nbytes))
        thread.start()
        thread.join()
        self.times.setdefault("populating", []).append(time.perf_counter() - began)
        with mmap.mmap(fd, nbytes) as memory:
            self.note("entering", lambda m=memory: m.madvise(POPULATE_WRITE))
            target = np.frombuffer(memory)
            self.note("ahead", lambda t=target: np.copyto(t, self.source))
            del target
        os.close(fd)

    def read(self) -> None:
        """Map a segment anew and read it, or a quarter of it, with and without populating first."""
        fd = os.memfd_create("to-be-read")
        nbytes = self.source.nbytes
        os.pwrite(fd, self.source.data, 0)
        for name, part, populate in (
            ("read all", SIZE, False),
            ("read all populated", SIZE, True),
            ("read a quarter", SIZE // 4, False),
            ("read a quarter populated", SIZE // 4, True),
        ):
            with mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) as memory:
                array = np.frombuffer(memory)
                self.note(name, lambda a=array, m=memory, n=part, p=populate: _read(a, m, n, populate=p))
                del array
        os.close(fd)

    def close(self) -> None:
        """Release everything."""
        self.store.drain()
        self.store.trim()
        self.store.close()


def _read(
    array: np.ndarray[tuple[int], np.dtype[np.float64]], memory: mmap.mmap, count: int, *, populate: bool
) -> None:
    if populate:
        memory.madvise(POPULATE_READ)
    array[:count].sum()


def run(*, quick: bool) -> Section:
    """Take turns in one process; no other process runs."""
    ways = Ways()
    contenders = {
        "copy": ways.copy,
        "fresh": ways.fresh,
        "warm": ways.warm,
        "ahead": ways.ahead,
        "read": ways.read,
    }
    ways.warm()
    median_seconds(contenders, 5 if quick else 15)
    ways.close()
    times = ways.times
    copy = statistics.median(times["copy"])
    ratio = {name: statistics.median(values) / copy for name, values in times.items()}
    return Section(
        "First sharing of a 64 MB array",
        [
            Figure("one copy into private memory", spread(times["copy"])),
            Figure("sharing, fresh memory", f"{spread(times['fresh'])}, {ratio['fresh']:.1f} × a copy"),
            Figure(
                "sharing, pool memory that was made by sharing once",
                f"{spread(times['second'])}, {ratio['second']:.2f} × a copy",
            ),
            Figure(
                "sharing, warm pool",
                f"{spread(times['warm'])}, {ratio['warm']:.2f} × a copy",
                aim=f"≤ {AIM_WARM} × a copy",
                met=ratio["warm"] <= AIM_WARM,
            ),
            Figure(
                "copy into memory populated ahead",
                f"{spread(times['ahead'])}; making it took "
                f"{spread(times['populating'])}, entering it into the page table {spread(times['entering'])}",
            ),
            *(
                Figure(f"new mapping, {name}", spread(times[name]))
                for name in times
                if name.startswith("read")
            ),
        ],
        "Populating ahead moves the cost to another core and needs to know the size, so it is not done for "
        "fresh memory (docs/dev/decisions/0007).",
    )
