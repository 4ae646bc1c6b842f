"""Slurm for real: what a person reads when a job ends or waits, and that nothing stays on any node.

The nodes share neither /tmp nor /dev/shm.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nbparallel.testing.waiting import wait_until
from tests.cluster.machines.notebooks import SlurmNotebook, slurm_cluster
from tests.cluster.machines.slurm_nodes import MEMORY_CGROUPS, NODES, SlurmNodes
from tests.harness.turns import Promised

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(300)]
GONE_SECONDS = 3.0
"""How long something may stay on a node after its job."""
LOST = r"HostLostError: host SLURMCluster-\d is lost, and ranks"
MORE = "`cluster.scale(jobs=2)` starts one"
PATIENCE = 90.0
NOBODY = 65534


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


@pytest.mark.fault("F97")
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


@pytest.mark.fault("F97")
def test_a_walltime_ends(notebook: SlurmNotebook, slurm: SlurmNodes) -> None:
    """Every job ends, the cell says so, and nothing is left; new jobs have the ranks again."""
    notebook.connect(walltime="00:01:00")
    said = notebook.run("%parallel time.sleep(200)", 180).text
    assert re.search(LOST, said)
    slurm.await_nothing_left(*NODES)
    said = notebook.say("%parallel rank")
    assert "the cluster had no worker in 3 s" in said
    assert "`cluster.scale(jobs=2)`" in said
    time.sleep(15)
    notebook.say("cluster.scale(jobs=2); cluster.wait_for_workers(2, timeout=60)")
    assert "Out[ranks 0-3]: 4" in notebook.say("%parallel all_reduce(1)")


def test_the_notebook_is_killed(notebook: SlurmNotebook, slurm: SlurmNodes, promised: Promised) -> None:
    """Its ranks end; Dask's workers notice later, and end their jobs."""
    notebook.connect()
    notebook.begin("%%parallel\nprint('here')\ntime.sleep(100)").wait_for("here", PATIENCE)
    assert [line for left in slurm.left().values() for line in left if "nbparallel" in line]
    with promised(GONE_SECONDS):
        notebook.kill()
        wait_until(
            lambda: not [line for left in slurm.left().values() for line in left if "nbparallel" in line],
            slurm.left,
        )


def test_a_node_loses_its_power(needs_slurm: None, promised: Promised) -> None:
    """Its host is lost, the other keeps its variables."""
    with SlurmNodes() as nodes, SlurmNotebook(nodes) as notebook:
        notebook.connect()
        notebook.say("%parallel kept = rank")
        cell = notebook.begin("%%parallel\nprint('here')\ntime.sleep(100)")
        cell.wait_for("here", PATIENCE)
        with promised(16.0):
            nodes.machines["n2"].cut_power()
            assert re.search(LOST, cell.wait(PATIENCE).text)
        ranks = re.findall(r"use ranks=\[(\d), (\d)\]", notebook.say("%parallel rank"))[0]
        assert "Error" not in notebook.say(f"%parallel -r {','.join(ranks)} kept")
        notebook.kill()  # it would wait long for Slurm to cancel the job of that node


def test_two_jobs_on_one_node(notebook: SlurmNotebook) -> None:
    """They are two hosts: the ranks of each have the processors and the memory of their own job."""
    assert "2 ranks on 2 hosts" in notebook.connect(2, "--nodelist=n1", cores=1)
    notebook.say("%parallel -o job os.environ['SLURM_JOB_ID'], all_reduce(1)")
    assert "2 {2}" in notebook.say("print(len(set(job)), {size for _, size in job})")


SECOND_USER = """
import sys
import nbparallel as nbp
{cluster}
session = nbp.Session(cluster=cluster)
for _ in range(2):
    print(session.run("import os, socket; socket.gethostname(), os.getuid()").values, flush=True)
    sys.stdin.readline()
cluster.close()
"""


def test_two_users_on_one_node(notebook: SlurmNotebook, slurm: SlurmNodes, promised: Promised) -> None:
    """Both have their ranks, side by side; the end of one leaves the other's alone."""
    controller, folder = slurm.machines["ctl"], slurm.home / "jobs"
    node = ["--nodelist=n1"]
    code = SECOND_USER.format(cluster=slurm_cluster(controller.address, 1, *node, cores=1))
    words = [*controller.prefix(), "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    words += [sys.executable, "-c", code]
    environment = {**os.environ, **slurm.environment, "HOME": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment, cwd=folder, text=True) as other:
        assert other.stdin
        assert other.stdout
        assert "1 rank on 1 host" in notebook.connect(1, *node, cores=1)
        notebook.say("%parallel kept = os.getuid()")
        for _ in range(2):
            assert other.stdout.readline() == f"[('n1', {NOBODY})]\n"
            assert "Out[rank 0]: 0" in notebook.say("%parallel kept")
            other.stdin.write("\n")
            other.stdin.flush()
        assert other.wait(PATIENCE) == 0
    assert "Out[rank 0]: 0" in notebook.say("%parallel kept")
    assert len(slurm.jobs()) == 1


@pytest.mark.fault("F98")
def test_a_job_has_no_more_memory_than_it_asked_for(needs_slurm: None) -> None:
    """The rank that takes more is killed; the error names it, and the other ranks keep their variables."""
    if not os.path.isdir(MEMORY_CGROUPS):
        pytest.skip("Slurm 22.05 limits memory by cgroup v1, which is not here")
    with SlurmNodes(memory=True) as nodes, SlurmNotebook(nodes) as notebook:
        notebook.connect()
        notebook.say("%parallel kept = rank")
        said = notebook.say("%parallel float((np.ones(300_000_000) if rank == 3 else np.ones(3)).sum())")
        assert "RankDiedError: rank 3 (host SLURMCluster-1)" in said
        assert "memory" in said
        assert "Out[ranks 0-2]: True" in notebook.say("%parallel -r 0-2 kept == rank")
