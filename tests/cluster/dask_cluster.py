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
    tls : bool
        Whether everything is encrypted, with a certificate that is made for it; nothing else is accepted.
    """

    def __init__(
        self,
        hosts: str = "ab",
        *options: str,
        nanny: bool = False,
        tls: bool = False,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="nbp-dask-")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._options = [*options, "--nanny" if nanny else "--no-nanny"]
        self.scheduler_file = str(Path(self.folder.name) / "scheduler.json")
        self.environment: dict[str, str] = {}
        """Of every process that is to use the cluster."""
        try:
            if tls:
                self._make_certificate()
            self._start(
                "scheduler", "scheduler", "--host", self.address(), "--port", "0", "--dashboard-address",
                "127.0.0.1:0", "--scheduler-file", self.scheduler_file, "--protocol", "tls" if tls else "tcp",
            )  # fmt: skip
            wait_until(
                lambda: Path(self.scheduler_file).exists() or self._ended(), self._log, seconds=WORKER_SECONDS
            )
            for host in hosts:
                self.start_worker(host)
            self.client = self.connect()
            self.await_workers(len(hosts))
        except BaseException:
            self.stop()
            raise

    def address(self, host: str = "") -> str:
        """Return the address of a host, or of the scheduler's."""
        return f"127.0.0.{1 + ' abcdefgh'.index(host or ' ')}"

    def prefix(self, name: str) -> list[str]:
        """Return the words that have a command run on the host of a process."""
        return []

    def _make_certificate(self) -> None:
        """Make a certificate and its key, as `environment` of all processes."""
        file = f"{self.folder.name}/both.pem"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        words += ["-subj", "/CN=nbparallel", "-keyout", file, "-out", f"{self.folder.name}/cert.pem"]
        subprocess.run(words, check=True, capture_output=True)
        with open(file, "a") as both:
            both.write(Path(f"{self.folder.name}/cert.pem").read_text())
        settings = {"REQUIRE_ENCRYPTION": "True", "TLS__CA_FILE": file}
        for role in ("SCHEDULER", "WORKER", "CLIENT"):
            settings |= {f"TLS__{role}__CERT": file, f"TLS__{role}__KEY": file}
        self.environment = {f"DASK_DISTRIBUTED__COMM__{name}": value for name, value in settings.items()}

    def connect(self) -> Any:
        """Return a new client."""
        from distributed import Client
        from distributed.security import Security

        file = self.environment.get("DASK_DISTRIBUTED__COMM__TLS__CA_FILE")
        security = None if file is None else Security(
            tls_ca_file=file, tls_client_cert=file, tls_client_key=file, require_encryption=True
        )  # fmt: skip
        return Client(scheduler_file=self.scheduler_file, timeout=WORKER_SECONDS, security=security)

    def await_workers(self, count: int) -> None:
        """Wait until the cluster has so many workers."""
        wait_until(lambda: len(self.workers()) == count, self._log, seconds=WORKER_SECONDS)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return what the scheduler says of its workers, by their addresses.

        The client's `scheduler_info` has none of them whenever the client has just renewed it by itself.
        """
        return dict(self.client.sync(self.client.scheduler.identity)["workers"])

    def start_worker(
        self, host: str, environment: Mapping[str, str] | None = None, *, name: str = "", threads: int = 2
    ) -> None:
        """Start a worker of a host; its name is the host's if it has none of its own."""
        self._start(
            name or host, "worker", "--scheduler-file", self.scheduler_file,
            "--name", name or NAMES.get(host, host), "--host", self.address(host), "--nthreads", str(threads),
            "--no-dashboard", "--local-directory", self.folder.name, *self._options,
            environment=environment,
        )  # fmt: skip

    def address_of(self, name: str) -> str:
        """Return the address of a worker; nothing if it is not there."""
        found = (address for address, worker in self.workers().items() if worker["name"] == name)
        return next(found, "")

    def _start(self, name: str, *words: str, environment: Mapping[str, str] | None = None) -> None:
        with open(f"{self.folder.name}/{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                # a run of tests that is killed takes its cluster along
                ["setpriv", "--pdeathsig", "KILL", *self.prefix(name), sys.executable, "-m", "dask", *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment, **(environment or {})},
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
