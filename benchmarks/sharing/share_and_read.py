"""Make an array, fill it, let four processes read all of it: beside the peers, each with workers that wait.

python -m benchmarks.sharing.share_and_read [--sizes BYTES …] [--launches N]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import nbparallel as nbp
from benchmarks.report import Figure, Section, human_seconds, not_installed
from benchmarks.sharing.sharing_peers import WORKERS, Peer, peers
from nbparallel.sharing import current_store

SIZES = (1 << 10, 1 << 20, 64 << 20, 1 << 30)
IN_A_CELL, A_CALL, A_CELL = "within a cell", "a call each time", "a cell each time"
WAYS = (IN_A_CELL, A_CALL, A_CELL)
SETUP = """
import time
first = nbp.zeros(1) if rank == 0 else None
first = broadcast(first, src=0, view=True)

def total(n, value):
    barrier()
    if rank:
        send(float(recv(src=0).sum()), 0)
        barrier()
        return [], 0.0
    time.sleep(0.002)
    began = time.perf_counter()
    x = nbp.empty(n)
    x.fill(value)
    for reader in range(1, world_size):
        send(x, reader, view=True)
    sums = [recv(src=reader) for reader in range(1, world_size)]
    took = time.perf_counter() - began
    barrier()
    return sums, took
"""


class InACell:
    """Five ranks: rank 0 makes the array, the others wait for it, as the peers' workers do: asleep."""

    name = IN_A_CELL

    def __init__(self) -> None:
        self._session = nbp.Session(WORKERS + 1)
        self._session.run(SETUP)
        self.seconds: float | None = None

    def total(self, n: int, value: float) -> list[float]:
        """As `Peer.total`."""
        sums, self.seconds = self._session.run(f"total({n}, {value})", show_values=False).values[0]
        return list(sums)

    def drop(self) -> None:
        """As `Peer.drop`: done with the cell."""

    def close(self) -> None:
        """As `Peer.close`."""
        self._session.stop()


def _sum(x: Any) -> float:
    return float(x.sum())


class CallEachTime:
    """Four ranks; this process makes the array and calls a function with it on each."""

    name = A_CALL
    seconds = None

    def __init__(self) -> None:
        self._session = nbp.Session(WORKERS)
        self._first, self._array = nbp.zeros(1), None
        self._session.call(_sum, self._first)

    def total(self, n: int, value: float) -> list[float]:
        """As `Peer.total`."""
        self._array = array = nbp.empty(n)
        array.fill(value)
        return self._session.call(_sum, array)

    def drop(self) -> None:
        """As `Peer.drop`."""
        self._array = None
        current_store().drain()

    def close(self) -> None:
        """As `Peer.close`."""
        self._first = self._array = None
        self._session.stop()


class CellEachTime:
    """Four ranks; the notebook makes the array and names it in a cell."""

    name = A_CELL
    seconds = None

    def __init__(self) -> None:
        self._session = nbp.Session(WORKERS)
        self._names: dict[str, Any] = {"first": nbp.zeros(1)}
        self._session.run("first", namespace=self._names, show_values=False)

    def total(self, n: int, value: float) -> list[float]:
        """As `Peer.total`."""
        self._names["x"] = nbp.empty(n)
        self._names["x"].fill(value)
        return list(self._session.run("float(x.sum())", namespace=self._names, show_values=False).values)

    def drop(self) -> None:
        """As `Peer.drop`; the ranks are notified with the next cell."""
        del self._names["x"]
        self._session.run("pass", namespace=self._names)
        current_store().drain()

    def close(self) -> None:
        """As `Peer.close`."""
        self._names.clear()
        self._session.stop()


def measure(sizes: Sequence[int], rounds: int) -> tuple[dict[int, dict[str, list[float]]], list[str]]:
    """Return seconds for each size and contender, of one launch; and the peers that are not installed."""
    found: dict[int, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        others, missing = peers(stack)
        contenders: list[Peer] = [InACell(), CallEachTime(), CellEachTime(), *others]
        for ours in contenders[: len(WAYS)]:
            stack.callback(ours.close)
        for nbytes in sizes:
            count = max(1, nbytes // 8)
            for contender in contenders:
                _check(contender, count)
            found[nbytes] = _take_turns(contenders, count, rounds if nbytes < 1 << 29 else min(rounds, 3))
    return found, missing


def _check(contender: Peer, n: int) -> None:
    right = [3.0 * n] * WORKERS
    got = contender.total(n, 3.0)
    contender.drop()
    if got != right:
        raise AssertionError(f"{contender.name} sums {n} threes to {got}")


def _take_turns(contenders: Sequence[Peer], n: int, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in contenders:
            began = time.perf_counter()
            contender.total(n, float(turn))
            took = time.perf_counter() - began
            times[contender.name].append(took if contender.seconds is None else contender.seconds)
            contender.drop()
    return times


def human_bytes(nbytes: int) -> str:
    """Write a size as the figures call it.

    >>> human_bytes(1024), human_bytes(64 << 20)
    ('1 KB', '64 MB')
    """
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def figures(sizes: Sequence[int], launches: int, rounds: int) -> list[Figure]:
    """Return a row for each size and peer."""
    collected: dict[int, dict[str, list[float]]] = {size: {} for size in sizes}
    missing: list[str] = []
    for _ in range(launches):
        found, missing = measure(sizes, rounds)
        for size, contenders in found.items():
            for name, times in contenders.items():
                collected[size].setdefault(name, []).append(statistics.median(times))
    rows = []
    for size, contenders in collected.items():
        medians = {name: statistics.median(times) for name, times in contenders.items()}
        ours = {way: medians.pop(way) for way in WAYS}
        for name, theirs in medians.items():
            rows.append(_row(human_bytes(size), ours[IN_A_CELL], name, theirs))
        for name in missing:
            rows.append(Figure(human_bytes(size), human_seconds(ours[IN_A_CELL]), not_installed(name)))
        quickest = min(medians, key=lambda name: medians[name])
        for way in (A_CALL, A_CELL):
            rows.append(_row(f"{human_bytes(size)}, {way}", ours[way], quickest, medians[quickest]))
    return rows


def _row(what: str, ours: float, name: str, theirs: float) -> Figure:
    peer = f"{name}: {human_seconds(theirs)}"
    return Figure(what, human_seconds(ours), peer, theirs / ours, "ahead", theirs > ours)


def run(*, quick: bool) -> Section:
    """Measure all sizes."""
    return Section(
        "An array that is made, filled, shared, and read by four processes",
        figures(SIZES, 1 if quick else 5, 3 if quick else 9),
        "Floats, filled where they lie if the peer can do that; every process sums all of them; the time "
        "ends with the last sum. Workers and ranks wait already, asleep, and ranks have one small shared "
        "array; freeing is not counted. joblib copies what the caller has filled. Rows without a remark: "
        "rank 0 makes the array and sends it to four others within a cell, as the peers' main process does; "
        "all functions were defined before. A call each time: this process makes the array and "
        "passes it to `Session.call` on four ranks, which sends the function as well. A cell each time: a "
        "notebook makes it and names it in a cell of four ranks. Those two stand beside the quickest peer.",
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for row in figures(options.sizes, options.launches, options.rounds):
        ratio = f"{row.ratio:8.1f} ×" if row.ratio else ""
        print(f"{row.what:24}{row.value:>12}  {row.peer:50}{ratio:>12}", flush=True)


if __name__ == "__main__":
    main()
