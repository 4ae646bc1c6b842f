"""How soon what has happened to a host is named, and how soon nothing is left: promised times."""

from __future__ import annotations

import re
import signal
import time

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import NbParallelError
from nbparallel.testing.processes import read
from nbparallel.testing.waiting import wait_until
from tests.cluster.dask.cluster_faults import EXCHANGE, all_below, error_of, perform, strike
from tests.cluster.dask_cluster import DaskProcesses
from tests.cluster.sink import Sink
from tests.harness.turns import Promised

pytestmark = [
    pytest.mark.slow,
    pytest.mark.time_limit(240),
    pytest.mark.may_leave("descriptor", "thread", reason="the client keeps connections with the scheduler"),
]
WAIT = "import time\ntime.sleep(60) if rank == 3 else barrier()"


@pytest.mark.fault("F90")
@pytest.mark.matrix
@pytest.mark.parametrize("cell", [WAIT, EXCHANGE], ids=["wait", "exchange"])
@pytest.mark.parametrize("fault", ["kill rank", "kill node", "kill worker"])
def test_a_death_is_named_within_a_second(
    fault: str, cell: str, fresh: DaskProcesses, promised: Promised
) -> None:
    """Nothing is left three seconds after the session was stopped."""
    session = nbp.Session(cluster=fresh.client)
    session.run("pass")
    pending = session.submit(cell, namespace={"np": np})
    time.sleep(0.5)
    pids = [pid for name in "ab" for pid in all_below(fresh.processes[name].pid)]
    with promised(1.0):
        strike(fresh, fault)
        error = error_of(lambda: pending.result(60))
    assert isinstance(error, NbParallelError)
    assert re.search(r"rank [23] \(host b\)" if fault == "kill rank" else "host b is lost", str(error))
    with promised(3.0):
        session.stop()
        wait_until(lambda: not [p for p in pids if read(p)], lambda: [read(p) for p in pids], seconds=60)


@pytest.mark.fault("F91")
@pytest.mark.matrix
@pytest.mark.parametrize("moment", ["idle", "cell", "exchange", "array"])
@pytest.mark.parametrize("fault", ["freeze worker", "freeze node"])
def test_a_frozen_host_is_named_within_sixteen_seconds(
    fault: str, moment: str, fresh: DaskProcesses, promised: Promised
) -> None:
    """By its silence alone; the others keep their variables."""
    session = nbp.Session(cluster=fresh.client)
    session.run("kept = rank")
    error, _ = perform(moment, fresh, session, fault, promised(16.0))
    assert isinstance(error, NbParallelError)
    assert re.search(r"host b is lost.*(has not answered|no answer|did not take)", str(error)), error
    assert session.run("kept", ranks=[0, 1]).values == [0, 1]
    session.stop()
    if fault == "freeze node":  # its worker ends it; one that is killed, as after this test, ends none
        worker = fresh.processes["b"].pid
        wait_until(lambda: not all_below(worker), lambda: all_below(worker), seconds=60)


@pytest.mark.fault("F91")
def test_a_host_that_is_frozen_for_a_while_is_not_lost(fresh: DaskProcesses) -> None:
    """Of twelve seconds nothing is left but a line."""
    sink = Sink()
    with nbp.Session(cluster=fresh.client) as session:
        session.run("kept = rank")
        cell = "import time; time.sleep(0 if rank > 1 else 15); all_reduce(rank)"
        pending = session.submit(cell, sink=sink)
        time.sleep(0.5)
        fresh.signal("b", signal.SIGSTOP)
        time.sleep(12)
        fresh.signal("b", signal.SIGCONT)
        assert pending.result(60).values == [6] * 4
        assert "host b has not answered for 5 s" in sink.notes
        assert session.run("kept").values == [0, 1, 2, 3]


@pytest.mark.fault("F90")
def test_nodes_end_with_a_cluster_that_is_told_to_end_at_once(fresh: DaskProcesses) -> None:
    """Scheduler and workers get SIGTERM together, as by the end of a batch job: no node is left."""
    session = nbp.Session(cluster=fresh.client)
    session.run("pass")
    pids = [pid for name in "ab" for pid in all_below(fresh.processes[name].pid)]
    for name in ("scheduler", "a", "b"):
        fresh.signal(name, signal.SIGTERM)
    wait_until(lambda: not [p for p in pids if read(p)], lambda: [read(p) for p in pids], seconds=60)
    assert isinstance(error_of(lambda: session.run("1")), NbParallelError)
    session.stop()
