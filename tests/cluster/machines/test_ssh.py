"""Machines over ssh, as Dask's SSHCluster uses them: a link is cut, a machine restarts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.machines.machines import missing_reason
from tests.cluster.machines.notebooks import SshNotebook
from tests.cluster.machines.ssh_machines import PROGRAMS, SshMachines
from tests.harness.turns import Promised

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(240)]
PATIENCE = 90.0


@pytest.fixture
def machines() -> Iterator[SshMachines]:
    """Return two machines that ssh reaches."""
    pytest.importorskip("asyncssh", reason="asyncssh is not installed: `make dask` puts it there")
    if (reason := missing_reason(*PROGRAMS)) is not None:
        pytest.skip(reason)
    with SshMachines() as made:
        yield made


@pytest.fixture
def notebook(machines: SshMachines) -> Iterator[SshNotebook]:
    """Return a notebook with ranks on both machines, in which each rank has a variable."""
    with SshNotebook(machines) as kernel:
        assert "4 ranks on 2 hosts" in (said := kernel.connect()), said
        assert "Out[ranks 0-3]: 4" in kernel.say("%%parallel\nkept = rank\nall_reduce(1)")
        yield kernel


def test_the_cluster_ends(notebook: SshNotebook, machines: SshMachines, promised: Promised) -> None:
    """After the end of the cluster nothing is left on the machines."""
    assert machines.left("s1", "s2").keys() == {"s1", "s2"}
    notebook.say("cluster.close()")
    with promised(3.0):
        machines.await_nothing_left("s1", "s2")


@pytest.mark.fault("F99")
@pytest.mark.parametrize("fault", ["link", "power"])
def test_a_machine_is_lost(
    fault: str, notebook: SshNotebook, machines: SshMachines, promised: Promised
) -> None:
    """The cell names it, the other keeps its variables, and what ran there ends."""
    cell = notebook.begin("%%parallel\nprint('here')\ntime.sleep(100)")
    cell.wait_for("here", PATIENCE)
    with promised(16.0):
        if fault == "link":
            machines.set_link("s2", "down")
        else:
            machines.reboot("s2")
        said = cell.wait(PATIENCE).text
    assert re.search(r"HostLostError: host 10.78.\d+.11 is lost, and ranks 2-3", said)
    assert "Out[ranks 0-1]: True" in notebook.say("%parallel -r 0-1 kept == rank")
    said = notebook.say("%parallel rank")
    assert "use ranks=[0, 1]" in said
    with promised(60.0):
        machines.await_nothing_left("s2")
    if fault == "power":
        address = notebook.run("print(cluster.scheduler_address)").stdout.strip()
        worker = [sys.executable, "-m", "dask", "worker", address, "--nthreads", "2"]
        notebook.say("known = set(cluster.scheduler_info['workers'])")  # the lost one, too
        machines.machines["s2"].start(*worker, log=machines.home / "worker.log")
        notebook.say("while not set(cluster.scheduler_info['workers']) - known: time.sleep(0.1)")
        said = notebook.say("%parallel all_reduce(1)")
        assert "variables of ranks 2-3" in said
        assert "Out[ranks 0-3]: 4" in said
