"""A notebook on a cluster, in a real kernel: to a worker's death and its replacement."""

from __future__ import annotations

import pytest

from tests.cluster.dask_cluster import DaskProcesses
from tests.harness.kernel import Kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.time_limit(240),
    pytest.mark.may_leave(
        "descriptor", "thread", reason="the client keeps connections, and Dask a thread for large messages"
    ),
]


def _connect(cluster: DaskProcesses) -> str:
    return f"""
%load_ext nbparallel
%config NbParallel.welcome = False
import numpy as np
from distributed import Client
client = Client(scheduler_file={cluster.scheduler_file!r})
%parallel_cluster client
"""


def _said(kernel: Kernel, code: str) -> str:
    return kernel.run(code, 60).text


def test_a_worker_dies_and_is_replaced(fresh: DaskProcesses, kernel: Kernel) -> None:
    """The cell's error and every line that follows name the host; the notebook goes on."""
    assert "4 ranks on 2 hosts" in _said(kernel, _connect(fresh))
    assert "sent to 2 hosts" in _said(kernel, "x = np.arange(1000.0)\n%parallel -o total float(x.sum())")
    assert "499500.0" in _said(kernel, "print(list(total))")
    assert "b     2-3" in _said(kernel, "%parallel_cluster")
    kernel.run("%%parallel\nkept = rank")
    running = kernel.begin("%%parallel\nimport time\nprint('here')\ntime.sleep(60 if rank > 1 else 1)")
    running.wait_for("here", 30)
    fresh.kill("b")
    outcome = running.wait(30)
    assert outcome.status == "error"
    assert "HostLostError: host b is lost, and ranks 2-3 (host b) with it" in outcome.text
    said = _said(kernel, "%%parallel\nrank")
    assert "HostLostError" in said
    assert "host b is lost" in said
    assert "ranks=[0, 1]" in said or "-r 0-1" in said
    assert "0" in _said(kernel, "%parallel -r @a kept")
    fresh.start_worker("b")
    fresh.await_workers(2)
    said = _said(kernel, "%%parallel\nprint('kept' in globals(), all_reduce(rank))")
    assert "host b was lost" in said
    assert "variables of ranks 2-3" in said
    assert "[ranks 0-1] True 6" in said
    assert "[ranks 2-3] False 6" in said
    assert "ended" in _said(kernel, "%parallel_stop")
