"""The link of a host goes down, and stays down: nobody hangs, errors name the host, nothing is left."""

from __future__ import annotations

import functools
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbparallel.testing.processes import read
from nbparallel.testing.waiting import wait_until
from tests.cluster.dask.cluster_faults import EXCHANGE, all_below
from tests.cluster.dask.conftest import MISSING
from tests.cluster.dask.host_networks import KERNEL, NetworkedDask
from tests.cluster.machines.machines import missing_reason
from tests.harness.turns import Promised

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.time_limit(300)]
MOMENTS = ["idle", "cell", "exchange"]
PATIENCE = 120.0
"""Dask notices after half a minute that a worker is not connected any more."""
_KERNEL = f"""
import json, os, sys, time
import numpy as np
from distributed import Client
import nbparallel as nbp
client = Client(scheduler_file=sys.argv[1])
client.wait_for_workers(2)
session = nbp.Session(cluster=client)
session.run("kept = rank")
cell = {{"cell": "import time; time.sleep(100)", "exchange": {EXCHANGE!r}}}.get(sys.argv[2])
pending = None if cell is None else session.submit(cell, namespace={{"np": np}})
time.sleep(0.5)
print("ready", flush=True)
sys.stdin.readline()

def outcome(call):
    try:
        return call()
    except nbp.NbParallelError as error:
        return f"{{type(error).__name__}}: {{error}}"

run = (lambda: session.run("rank").values) if pending is None else lambda: pending.result(100)
for call in run, lambda: list(session.run("kept", ranks=[0, 1]).values), session.stop:
    print(json.dumps(outcome(call)), flush=True)
os._exit(0)
"""


@pytest.fixture
def networked() -> Iterator[NetworkedDask]:
    """Start a cluster whose hosts are connected by cables."""
    pytest.importorskip("distributed", reason=MISSING)
    if (reason := missing_reason()) is not None:
        pytest.skip(reason)
    with NetworkedDask() as cluster:
        yield cluster


class Notebook:
    """A notebook's process on a host of its own, in which a session has started."""

    def __init__(self, cluster: NetworkedDask, moment: str, script: Path) -> None:
        script.write_text(_KERNEL)
        words = [*cluster.prefix(KERNEL), sys.executable, str(script), cluster.scheduler_file, moment]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, bufsize=0)  # as `select` sees it
        assert self.line() == b"ready\n"

    def line(self) -> bytes:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], PATIENCE)[0], "it hangs"
        return self._process.stdout.readline()

    def said(self) -> Any:
        """Return what its next call has returned or raised."""
        return json.loads(self.line())

    def tell(self) -> None:
        """Tell it that the fault has happened."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"down\n")

    def end(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def begin(networked: NetworkedDask, tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts a notebook at a moment."""
    started: list[Notebook] = []

    def start(moment: str) -> Notebook:
        started.append(Notebook(networked, moment, tmp_path / "kernel.py"))
        return started[0]

    yield start
    for notebook in started:
        notebook.end()


def _gone(pids: list[int]) -> None:
    there = lambda: [pid for pid in pids if read(pid)]  # noqa: E731
    wait_until(lambda: not there(), lambda: [read(pid) for pid in there()], seconds=PATIENCE)


@pytest.mark.fault("F92")
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_link_of_a_host(moment: str, networked: NetworkedDask, begin: Any, promised: Promised) -> None:
    """It is lost as if it were frozen; the others keep their variables, and its own ranks end as well."""
    notebook = begin(moment)
    here, there = (functools.partial(all_below, networked.processes[name].pid) for name in "ab")
    mine, lost = here(), there()
    assert mine
    assert lost
    networked.take_down("b")
    with promised(16.0):
        notebook.tell()
        error = notebook.said()
    assert "host b is lost" in error
    assert notebook.said() == [0, 1]
    with promised(3.0):
        notebook.line()
        _gone(mine)
    with promised(45.0):
        _gone(lost)


@pytest.mark.fault("F93")
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_link_of_the_notebook(
    moment: str, networked: NetworkedDask, begin: Any, promised: Promised
) -> None:
    """Every rank ends once the scheduler has noticed; the notebook is told as well."""
    notebook = begin(moment)
    workers = [networked.processes[name] for name in "ab"]
    pids = [pid for worker in workers for pid in all_below(worker.pid)]
    assert pids
    networked.take_down(KERNEL)
    notebook.tell()
    with promised(35.0):
        _gone(pids)
    error = notebook.said()
    assert "HostLostError" in error or "scheduler" in error
    notebook.said()
    notebook.said()
    assert all(worker.poll() is None for worker in workers)
