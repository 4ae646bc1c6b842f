"""A host whose clock shows another time: what two hosts do at once is drawn at once."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

import nbparallel as nbp
from tests.cluster.dask.conftest import MISSING
from tests.cluster.dask_cluster import DaskProcesses
from tests.cluster.host_conformance import meeting

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(120)]
AHEAD = 100_000
"""Seconds by which the clock of host b is ahead."""
SKEWED = ["unshare", "--time", "--monotonic", str(AHEAD), "--fork", "--kill-child"]
CELL = """
import time
time.sleep(0.2 * (rank == 3))
all_reduce(rank)
x = np.ones(200_000)
for i in range(20): all_reduce(x, "max")
time.sleep(1.2)
barrier()
time.monotonic()
"""


class SkewedDask(DaskProcesses):
    """A cluster whose host b has another clock."""

    def prefix(self, name: str) -> list[str]:
        """Return the words that have a command run on the host of a process."""
        return SKEWED * (name == "b")


def test_operations_of_two_hosts_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    """No rank leaves a collective before the last one came to it, within the error that is said."""
    pytest.importorskip("distributed", reason=MISSING)
    if (tried := subprocess.run([*SKEWED, "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"this machine makes no time namespace: {tried.stderr.strip()}")
    with SkewedDask("ab") as dask, nbp.Session(4, cluster=dask.client, ranks_per_host=2) as session:
        session.run("pass")
        times = session.run(CELL, namespace={"np": np}).values
        assert AHEAD - 60 < times[3] - times[0] < AHEAD + 60
        timeline = session.timeline()
    assert timeline is not None
    error = timeline.clock_error
    assert error is not None
    assert 0 < error < 0.05
    assert 1.2 < timeline.seconds < 30
    assert {wait.waits_for for wait in timeline.waits() if (wait.line, wait.rank == 3) == (3, False)} == {3}
    for line in (3, 7):
        came, left = meeting(timeline, line)
        assert came <= left + error
    with capsys.disabled():
        print(f"\nclocks that differ by {AHEAD} s: compared within {1e3 * error:.2f} ms")
