"""Processes that a test starts as a launcher would: plain ones, with nothing but their environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbparallel.testing import processes
from nbparallel.testing.processes import ProcessRecord
from nbparallel.testing.waiting import wait_until

SECONDS = 300.0
"""A generous bound for scripts that end within a second: the machine may be busy with something else."""
PREAMBLE = """\
import json, os, signal, sys, time
import numpy as np
import nbparallel as nbp
import nbparallel.distributed as dist
from nbparallel import errors

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell started the tests behind "&"

def say(**values):
    os.write(1, (json.dumps(values) + "\\n").encode())

"""


class Script:
    """One process, running a script; its output is read when it has ended."""

    def __init__(self, folder: Path, number: int, code: str, environment: Mapping[str, str]) -> None:
        self.path = folder / f"script{number}.py"
        self.path.write_text(PREAMBLE + code)
        self._out, self._err = folder / f"out{number}", folder / f"err{number}"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
            )

    @property
    def said(self) -> list[dict[str, Any]]:
        """What it has said so far."""
        return [json.loads(line) for line in self._out.read_text().splitlines()]

    @property
    def stderr(self) -> str:
        """What it has complained about so far."""
        return self._err.read_text()

    def wait(self, code: int = 0) -> dict[str, Any]:
        """Wait for its end; return all that it has said."""
        assert self.process.wait(SECONDS) == code, self.stderr
        return {key: value for line in self.said for key, value in line.items()}

    def until_it_says(self, key: str) -> Any:
        """Wait until it has said something of this name."""
        found: list[Any] = []

        def look() -> bool:
            found.extend(line[key] for line in self.said if key in line)
            assert found or self.process.poll() is None, self.stderr
            return bool(found)

        wait_until(look)
        return found[0]


class Launcher:
    """Starts scripts in a folder; their places to meet lie in another one, `meeting`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.protocol = folder / "scripts", folder / "meeting"
        self.folder.mkdir()
        self.protocol.mkdir()
        self.scripts: list[Script] = []

    def start(self, code: str, **environment: object) -> Script:
        """Start one process."""
        values = {"TMPDIR": str(self.protocol), "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
        values |= {name: str(value) for name, value in environment.items()}
        self.scripts.append(Script(self.folder, len(self.scripts), code, values))
        return self.scripts[-1]

    def world(self, size: int, code: str, **environment: object) -> list[Script]:
        """Start the processes of one world."""
        return [self.start(code, RANK=rank, WORLD_SIZE=size, **environment) for rank in range(size)]

    def supervisors(self) -> list[ProcessRecord]:
        """Return the supervisors of worlds of this test run."""
        mark = os.environ[processes.MARK]
        return [r for r in processes.family(os.getpid(), mark) if "supervisor.external_world" in r.command]

    def places(self) -> list[str]:
        """Return what lies where worlds meet."""
        return sorted(str(path.relative_to(self.protocol)) for path in self.protocol.rglob("*"))

    def close(self) -> None:
        """End what still runs."""
        for script in self.scripts:
            if script.process.poll() is None:
                script.process.kill()
            script.process.wait(SECONDS)


def end_supervisor(launcher: Launcher) -> None:
    """Kill the only supervisor of a world."""
    os.kill(only_supervisor(launcher).pid, signal.SIGKILL)


def only_supervisor(launcher: Launcher) -> ProcessRecord:
    """Return the only supervisor of a world, once its first half, from which it forked away, has exited."""
    wait_until(lambda: len(launcher.supervisors()) == 1)
    return launcher.supervisors()[0]
