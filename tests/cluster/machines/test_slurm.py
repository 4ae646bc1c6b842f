"""Slurm for real: what a person reads when a job ends or waits, and that nothing stays on any node.

The nodes share neither /tmp nor /dev/shm.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.cluster.machines.notebooks import SlurmNotebook
from tests.cluster.machines.slurm_nodes import NODES, SlurmNodes
from tests.harness.turns import Promised

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(300)]
GONE_SECONDS = 3.0
"""How long something may stay on a node after its job."""
LOST = r"HostLostError: host SLURMCluster-\d is lost, and ranks"
MORE = "`cluster.scale(jobs=2)` starts one"
PATIENCE = 90.0


@pytest.fixture
def notebook(slurm: SlurmNodes) -> Iterator[SlurmNotebook]:
    """Return a notebook with no jobs yet; afterwards nothing is left on any node."""
    try:
        with SlurmNotebook(slurm) as kernel:
            yield kernel
        slurm.await_nothing_left()
    finally:
        slurm.end_jobs()


def test_a_notebook_on_two_nodes(notebook: SlurmNotebook, slurm: SlurmNodes, promised: Promised) -> None:
    """Its ranks are on both, names and sums travel; after the end of the cluster nothing is left."""
    assert "4 ranks on 2 hosts" in notebook.connect()
    where = "import socket\nsocket.gethostname(), all_reduce(1)"
    assert "Error" not in notebook.say(f"%%parallel -o where\n{where}")
    assert "[('n1', 4), ('n2', 4)]" in notebook.say("print(sorted(set(where)))")
    notebook.say("x = np.arange(1e6)")
    assert "499999500000.0" in notebook.say("%parallel float(x.sum())")
    assert {name for name, left in slurm.left().items() if left} == set(NODES)
    notebook.say("cluster.close()")
    with promised(GONE_SECONDS):
        slurm.await_nothing_left()


@pytest.mark.parametrize("moment", ["in a cell", "between cells"])
def test_scancel(moment: str, notebook: SlurmNotebook, slurm: SlurmNodes, promised: Promised) -> None:
    """The host is named, the other keeps its variables, and the advice is what helps."""
    notebook.connect()
    notebook.say("%parallel kept = rank")
    job = slurm.job_on("n2")
    cell = notebook.begin(
        f"%%parallel\nprint('here')\nimport time; time.sleep({100 * (moment == 'in a cell')})"
    )
    cell.wait_for("here", PATIENCE)
    if moment == "between cells":
        cell.wait(PATIENCE)
    with promised(GONE_SECONDS):
        slurm.say("scancel", job)
        slurm.await_nothing_left("n2")
    if moment == "in a cell":
        assert re.search(LOST, cell.wait(PATIENCE).text)
    said = notebook.say("%parallel rank")
    assert re.search(LOST, said)
    assert MORE in said
    ranks = re.findall(r"use ranks=\[(\d), (\d)\]", said)[0]
    assert "Error" not in notebook.say(f"%parallel -r {','.join(ranks)} kept")
    time.sleep(15)  # the advice says so
    notebook.say("cluster.scale(jobs=2); cluster.wait_for_workers(2, timeout=60)")
    said = notebook.say("%parallel all_reduce(1)")
    assert "variables of ranks" in said
    assert "Out[ranks 0-3]: 4" in said


def test_jobs_that_wait(notebook: SlurmNotebook, slurm: SlurmNodes, promised: Promised) -> None:
    """A line says so, and an interrupt ends the wait; if only some have started, a line says that."""
    with slurm.drained(*NODES):
        notebook.submit(2)
        cell = notebook.begin("%parallel_cluster cluster")
        cell.wait_for("no worker yet: 2 jobs wait in the queue", PATIENCE)
        with promised(1.0):
            notebook.interrupt()
            assert "KeyboardInterrupt" in cell.wait(PATIENCE).text
    with slurm.drained("n2"):
        said = notebook.say("%parallel_cluster cluster")
    assert "1 of 2 workers" in said
    assert "2 ranks on 1 host" in said
    notebook.say("cluster.wait_for_workers(2, timeout=60)")
    assert "4 ranks on 2 hosts" in notebook.say("%parallel_cluster cluster")


def test_a_drained_node(notebook: SlurmNotebook, slurm: SlurmNodes) -> None:
    """What runs there goes on; a job in place of a lost one waits, and the next cell says what to do."""
    notebook.connect()
    with slurm.drained("n2"):
        assert "Out[ranks 0-3]: 4" in notebook.say("%parallel all_reduce(1)")
        slurm.say("scancel", slurm.job_on("n2"))
        slurm.await_nothing_left("n2")
        said = notebook.say("%parallel rank")
        assert re.search(LOST, said)
        assert MORE in said


def test_a_walltime_ends(notebook: SlurmNotebook, slurm: SlurmNodes) -> None:
    """Every job ends, the cell says so, and nothing is left; new jobs have the ranks again."""
    notebook.connect(walltime="00:01:00")
    said = notebook.run("%parallel time.sleep(200)", 180).text
    assert re.search(LOST, said)
    slurm.await_nothing_left(*NODES)
    said = notebook.say("%parallel rank")
    assert "the cluster had no worker in 3 s" in said
    assert "`cluster.scale(jobs=2)`" in said
