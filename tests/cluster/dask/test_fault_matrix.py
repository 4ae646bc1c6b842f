"""Every fault at every moment: nobody hangs, nothing is left, survivors keep their variables.

What hits host b ends in an error that names it, or in nothing at all where its ranks were not needed.  The
next cell runs on all ranks as soon as there is a worker for them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import nbparallel as nbp
from nbparallel.errors import NbParallelError
from nbparallel.testing.processes import read
from nbparallel.testing.waiting import wait_until
from tests.cluster.dask.cluster_faults import FAULTS, MOMENTS, PATIENCE, all_below, error_of, perform
from tests.cluster.dask_cluster import DaskProcesses
from tests.harness.turns import Promised

pytestmark = [
    pytest.mark.slow,
    pytest.mark.matrix,
    pytest.mark.time_limit(240),
    pytest.mark.may_leave("descriptor", "thread", reason="the client keeps connections with the scheduler"),
]
NAMED = {
    "kill rank": r"rank [23] |host b",
    "kill node": "host b",
    "kill worker": "host b",
    "kill scheduler": "scheduler",
    "freeze worker": "host b",
    "freeze node": "host b",
    "close link": r"the link between the hosts is closed",
}
"""What the error says."""
UNHURT = {
    ("kill rank", "start"), ("kill rank", "idle"), ("kill rank", "array"), ("kill node", "idle"),
    *(("close link", moment) for moment in ("start", "idle", "cell", "array")),
}  # fmt: skip
"""Where the cell may run as if nothing had happened: its ranks are started, or its hosts connected, again."""
FROZEN_SECONDS = 5


@pytest.fixture
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a frozen host up after few seconds in place of fifteen and more."""
    if not request.node.callspec.params["fault"].startswith("freeze"):
        return
    from nbparallel.cluster import host_dispatch, host_pool

    monkeypatch.setattr(host_dispatch, "MOST_LOOKS", FROZEN_SECONDS)
    for module in (host_dispatch, host_pool):
        monkeypatch.setattr(module, "ANSWER_SECONDS", float(FROZEN_SECONDS))
    monkeypatch.setattr(host_pool, "START_SECONDS", 20.0)
    monkeypatch.setattr(host_pool, "MOST_SECONDS", 25.0)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("impatient")
def test_a_fault(
    fault: str,
    moment: str,
    fresh: DaskProcesses,
    record_property: Callable[[str, object], None],
    promised: Promised,
) -> None:
    """The error names what was lost; survivors, the next cell, and what is left: nothing, soon."""
    a, b = fresh.processes["a"], fresh.processes["b"]
    session = nbp.Session(cluster=fresh.client)
    if moment != "start":
        session.run("kept = rank")
    error, seconds = perform(moment, fresh, session, fault)
    record_property(f"seconds of {fault} in {moment}", round(seconds, 2))
    assert isinstance(error, NbParallelError) or (error is None and (fault, moment) in UNHURT), error
    if error is not None:
        assert re.search(NAMED[fault], str(error)), error
    pids = all_below(a.pid) + all_below(b.pid)
    if fault == "kill scheduler":
        with pytest.raises(NbParallelError, match="scheduler"):
            session.run("1")
    else:
        if moment != "start":
            assert session.run("kept", ranks=[0, 1]).values == [0, 1]
        if fault in ("kill worker", "freeze worker", "freeze node"):
            if fault == "freeze worker":
                fresh.signal("b", signal.SIGCONT)
            # Its worker ends a frozen node, and a worker that goes on its own; one that is killed ends none.
            wait_until(lambda: not all_below(b.pid), lambda: all_below(b.pid), seconds=PATIENCE)
            b.kill()
            b.wait(10)
            fresh.start_worker("b")
            wait_until(lambda: fresh.address_of("b"), seconds=PATIENCE)
            fresh.await_workers(2)
        if fault in ("close link", "kill rank") and error is None:  # what has not needed it may not know yet
            late = error_of(lambda: session.run("barrier()"))
            assert late is None or re.search(NAMED[fault], str(late)), late
        assert session.run("all_reduce(rank)").values == [6] * 4
        pids += all_below(a.pid) + all_below(fresh.processes["b"].pid)
        if moment != "start":
            assert session.run("kept", ranks=[0, 1]).values == [0, 1]
    with promised(5.0 if fault == "kill scheduler" else 3.0):
        session.stop()
        wait_until(lambda: not [p for p in pids if read(p)], lambda: [read(p) for p in pids])


_KERNEL = """
import sys, time
import numpy as np
from distributed import Client
import nbparallel as nbp
client = Client(scheduler_file=sys.argv[1])
session = nbp.Session(cluster=client)
print("started", flush=True)
session.start()
big = np.ones(40_000_000)
print("ran", flush=True)
cell = {"start": "pass", "idle": "pass", "cell": "import time; time.sleep(100)", "array": "float(big.sum())",
        "exchange": "x = np.ones(300_000)\\nwhile True: all_reduce(x, 'max')",
        "message": "x = np.ones(300_000)\\nwhile True: sendrecv(x, (rank + 2) % 4)"}[sys.argv[2]]
session.run(cell, namespace={"np": np, "big": big})
time.sleep(100)
"""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_kernel(
    moment: str,
    fresh: DaskProcesses,
    tmp_path: Path,
    promised: Promised,
) -> None:
    """Every rank ends within three seconds, the workers go on, and so does the next session."""
    script = tmp_path / "kernel.py"
    script.write_text(_KERNEL)
    workers = [fresh.processes[name].pid for name in "ab"]
    words = [sys.executable, str(script), fresh.scheduler_file, moment]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "started\n"
        if moment == "start":
            wait_until(lambda: all_below(workers[1]), seconds=PATIENCE)
        else:
            assert kernel.stdout.readline() == "ran\n"
            time.sleep(0.2 if moment == "array" else 0.5)
        kernel.kill()
    with promised(3.0):
        wait_until(lambda: not any(map(all_below, workers)), lambda: [*map(all_below, workers)])
    with nbp.Session(cluster=fresh.client) as session:
        assert session.run("all_reduce(rank)").values == [6] * 4
    assert all(os.path.exists(f"/proc/{pid}") for pid in workers)
