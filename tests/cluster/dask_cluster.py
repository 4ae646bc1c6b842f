"""Real Dask processes for tests: a scheduler, and workers on addresses of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nbparallel.testing.waiting import wait_until

WORKER_SECONDS = 60.0
NAMES = {"c": "slurm-0/1"}
"""Of workers whose names are not their letters."""


class DaskProcesses:
    """A cluster whose hosts are addresses of this machine: host a is 127.0.0.2, host b 127.0.0.3.

    Parameters
    ----------
    hosts : str
        A letter for each worker, which is its name.
    options : str
        More arguments of ``dask worker``.
    """

    def __init__(
        self,
        hosts: str = "ab",
        *options: str,
        nanny: bool = False,
        scheduler: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="nbp-dask-")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._options = [*options, "--nanny" if nanny else "--no-nanny"]
        self.scheduler_file = str(Path(self.folder.name) / "scheduler.json")
        try:
            self._start(
                "scheduler", "scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address",
                "127.0.0.1:0", "--scheduler-file", self.scheduler_file,
            )  # fmt: skip
            wait_until(
                lambda: Path(self.scheduler_file).exists() or self._ended(), self._log, seconds=WORKER_SECONDS
            )
            for host in hosts:
                self.start_worker(host)
            from distributed import Client

            self.client: Any = Client(scheduler_file=self.scheduler_file, timeout=WORKER_SECONDS)
            self.await_workers(len(hosts))
        except BaseException:
            self.stop()
            raise

    def await_workers(self, count: int) -> None:
        """Wait until the cluster has so many workers."""
        workers = lambda: self.client.scheduler_info(n_workers=-1)["workers"]  # noqa: E731
        wait_until(lambda: len(workers()) == count, self._log, seconds=WORKER_SECONDS)

    def start_worker(self, host: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the worker of a host."""
        address = f"127.0.0.{2 + 'abcdefgh'.index(host)}"
        self._start(
            host, "worker", "--scheduler-file", self.scheduler_file, "--name", NAMES.get(host, host),
            "--host", address, "--nthreads", "2", "--no-dashboard",
            "--local-directory", self.folder.name, *self._options,
            environment=environment,
        )  # fmt: skip

    def _start(self, name: str, *words: str, environment: Mapping[str, str] | None = None) -> None:
        with open(f"{self.folder.name}/{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "dask", *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                cwd=self.folder.name,  # `python -m` looks there first
            )

    def _ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes.values())

    def _log(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in Path(self.folder.name).glob("*.log"))

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one of the processes."""
        os.kill(self.processes[name].pid, number)

    def kill(self, name: str) -> None:
        """Kill one of the processes, and wait until it is gone."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(10)

    def stop(self) -> None:
        """End all of them."""
        if client := getattr(self, "client", None):
            client.close(timeout=2)
        for process in self.processes.values():
            process.kill()  # a worker that loses its scheduler while it closes may wait for it for minutes
        for process in self.processes.values():
            process.wait(10)
        self.folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
