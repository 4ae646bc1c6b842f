"""One rank under mpiexec: ``mpi_worker.py THREAD_LEVEL SECONDS RESULT OPERATION``; with mpi4py and numpy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np

from benchmarks.operations.lines import lines
from benchmarks.operations.rounds import measure


class OverMpi:
    """mpi4py's upper-case methods, on numpy's own memory."""

    def __init__(self, mpi: Any) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def array(self, shape: tuple[int, ...], dtype: type) -> Any:
        return np.zeros(shape, dtype)

    def agree(self, value: float) -> float:
        return float(self._world.allreduce(value, self._mpi.MAX))

    def barrier(self) -> Callable[[], Any]:
        return self._world.Barrier

    def all_reduce(self, x: Any) -> Callable[[], Any]:
        return lambda: self._world.Allreduce(self._mpi.IN_PLACE, x)

    def broadcast(self, x: Any) -> Callable[[], Any]:
        return lambda: self._world.Bcast(x, 0)

    def gather(self, out: Any, x: Any) -> Callable[[], Any]:
        target = out if self.rank == 0 else None
        return lambda: self._world.Gather(x, target, 0)

    def scatter(self, out: Any, x: Any) -> Callable[[], Any]:
        source = x if self.rank == 0 else None
        return lambda: self._world.Scatter(source, out, 0)

    def all_to_all(self, out: Any, x: Any) -> Callable[[], Any]:
        return lambda: self._world.Alltoall(x, out)

    def reduce_scatter(self, out: Any, x: Any) -> Callable[[], Any]:
        return lambda: self._world.Reduce_scatter_block(x, out)

    def send(self, x: Any) -> Callable[[], Any]:
        if self.rank == 0:
            return lambda: self._world.Send(x, 1)
        return lambda: self._world.Recv(x, 0)

    def ping_pong(self, x: Any) -> Callable[[], Any]:
        send, receive, other = self._world.Send, self._world.Recv, 1 - self.rank
        if self.rank == 0:
            return lambda: (send(x, other), receive(x, other))
        return lambda: (receive(x, other), send(x, other))

    def view(self, operation: str, x: Any) -> Callable[[], Any] | None:
        return None


def main() -> None:
    """Measure, and write what all ranks found."""
    level, seconds, result, operation = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    mpi4py.rc.thread_level = level
    from mpi4py import MPI

    adapter = OverMpi(MPI)
    chosen = [line for line in lines(adapter.size) if operation in ("", line.operation)]
    times = measure({"mpi": adapter}, chosen, adapter, seconds)
    gathered = MPI.COMM_WORLD.gather(times, 0)
    if adapter.rank == 0:
        version = MPI.Get_library_version().partition("\n")[0].partition(",")[0].replace("\t", " ")
        result.write_text(json.dumps({"version": version, "times": gathered}))


if __name__ == "__main__":
    main()
