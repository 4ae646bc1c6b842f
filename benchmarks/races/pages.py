"""What it costs to watch which pages are written: beginning, asking, ending, and the writes themselves."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import Figure, Section, spread
from nbparallel.distributed.races.recording.written_pages import PageWatch
from nbparallel.wire.units import size_text

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
_COLLAPSE = 25
"""MADV_COLLAPSE, of Linux 6.1."""
_MAP_FIXED = 0x10
Bytes = npt.NDArray[np.uint8]
Times = dict[str, list[float]]


_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


class Memory:
    """Shared memory that another process has written, mapped where huge pages fit."""

    def __init__(self, nbytes: int, state: str) -> None:
        fd = os.memfd_create("races_pages")
        for start in range(0, nbytes, HUGE):
            os.pwrite(fd, b"\1" * HUGE, start)
        # The owner of the addresses; it unmaps what is placed into them, too.
        self._map = mmap.mmap(-1, nbytes + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(self._map, np.uint8)
        shift = -whole.ctypes.data % HUGE
        self.array: Bytes = whole[shift : shift + nbytes]
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        address = self.array.ctypes.data
        if _map(address, nbytes, rights, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap failed")
        os.close(fd)
        if state != "untouched":
            self.touch()
        if state == "huge":
            self._map.madvise(_COLLAPSE, shift, nbytes)

    def touch(self) -> None:
        """Write one byte of every page."""
        self.array[::PAGE] = 2

    def read(self) -> int:
        """Read one byte of every page."""
        return int(self.array[::PAGE].sum())


def _timed(times: Times, what: str, call: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = call()
    times.setdefault(what, []).append(time.perf_counter() - started)
    return result


def _page_tables() -> int:
    """Return the KiB of this process's page tables (proc_pid_status(5))."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmPTE:"))


def _watch_of(memory: Memory) -> PageWatch:
    return PageWatch([(memory.array.ctypes.data, memory.array.nbytes)])


def _measure(nbytes: int, state: str, times: Times) -> None:
    """One round: without a watch, and with one."""
    memory = Memory(nbytes, state)
    _timed(times, f"read, {state}, unwatched", memory.read)
    _timed(times, f"write, {state}, unwatched", memory.touch)
    del memory
    memory = Memory(nbytes, state)
    watch = _watch_of(memory)
    tables = _page_tables()
    _timed(times, f"begin, {state}", watch.__enter__)
    times.setdefault(f"tables, {state}", []).append(_page_tables() - tables)
    if watch.refused:
        raise RuntimeError(watch.refused)
    if _timed(times, f"nothing, {state}", watch.written):
        raise RuntimeError("pages count as written that were not")
    _timed(times, f"read, {state}", memory.read)
    memory.array[:: 2 * PAGE] = 1
    if len(_timed(times, f"every second, {state}", watch.written)) != nbytes // PAGE // 2:
        raise RuntimeError("not every second page counts as written")
    watch.close()
    with _watch_of(memory) as watch:
        _timed(times, f"write, {state}", memory.touch)
        _timed(times, f"write again, {state}", memory.touch)
        if sum(part[1] for part in _timed(times, f"all, {state}", watch.written)) != nbytes:
            raise RuntimeError("not every page counts as written")
        _timed(times, f"end, {state}", watch.close)
    _timed(times, f"write after, {state}", memory.touch)


def run(*, quick: bool) -> Section:
    """Measure one memory that no process has touched, one that was, and one of huge pages."""
    nbytes = (1 << 28) if quick else (1 << 30)
    size = size_text(nbytes)
    times: Times = {}
    missing = ""
    for _ in range(2 if quick else 5):
        for state in ("untouched", "touched", "huge"):
            try:
                _measure(nbytes, state, times)
            except OSError as error:
                missing = f" No huge pages could be had here ({error.strerror})."
    states = [state for state in ("untouched", "touched", "huge") if f"begin, {state}" in times]
    figures: list[Figure] = []
    for what, name in (
        ("begin", f"begin to watch {size}"),
        ("nothing", "ask, nothing written"),
        ("every second", "ask, every second page written"),
        ("all", "ask, every page written"),
        ("end", "end"),
    ):
        figures += [Figure(f"{name}, {state}", spread(times[f"{what}, {state}"])) for state in states]
    pages = nbytes // PAGE
    for what, name in (("read", "first read of a page"), ("write", "first write to a page")):
        for state in states:
            watched, plain = times[f"{what}, {state}"], times[f"{what}, {state}, unwatched"]
            ratio = statistics.median(plain) / statistics.median(watched)
            figures.append(
                Figure(f"{name}, {state}", _each(watched, pages), f"unwatched: {_each(plain, pages)}", ratio)
            )
    figures += [
        Figure(f"second write to a page, {state}", _each(times[f"write again, {state}"], pages))
        for state in states
    ]
    figures += [
        Figure(f"write to a page after the watch, {state}", _each(times[f"write after, {state}"], pages))
        for state in states
    ]
    figures += [
        Figure(
            f"page tables of {size}, {state}", f"{statistics.median(times[f'tables, {state}']):.0f} KiB more"
        )
        for state in states
    ]
    notes = (
        f"A memfd of {size}, new in each round and for each state. *Untouched*: as in a rank that has just "
        "mapped what the notebook wrote; *touched*: in the page table; *huge*: there as huge pages, which a "
        f"watch enters as small ones. Reads and writes are of one byte of each page.{missing}"
    )
    return Section("Watching which pages are written", figures, notes)


def _each(times: list[float], count: int) -> str:
    each = sorted(1e9 * seconds / count for seconds in times)
    return f"{statistics.median(each):.0f} ns ({each[0]:.0f} … {each[-1]:.0f} ns)"
