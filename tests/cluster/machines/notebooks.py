"""A notebook on the machine where people log in, with a cluster of Slurm's jobs."""

from __future__ import annotations

from tests.cluster.machines.slurm_nodes import SlurmNodes
from tests.harness.kernel import Kernel

CELL_SECONDS = 90.0
START = """
%load_ext nbparallel
%config NbParallel.welcome = False
import os, time
import numpy as np
from dask_jobqueue import SLURMCluster
cluster = SLURMCluster(
    cores=2, memory="1GB", walltime="{walltime}", processes=1,
    scheduler_options={{"host": "{address}", "dashboard_address": ":0"}}, job_extra_directives=["--nodes=1"],
)
"""


class SlurmNotebook(Kernel):
    """A kernel there; `submit` makes its variable `cluster`."""

    def __init__(self, nodes: SlurmNodes) -> None:
        super().__init__(env=nodes.environment, cwd=nodes.home / "jobs")
        self._nodes = nodes

    def say(self, code: str) -> str:
        """Run a cell; return all that it showed."""
        return self.run(code, CELL_SECONDS).text

    def submit(self, jobs: int, walltime: str = "00:10:00") -> None:
        """Submit jobs for a cluster."""
        start = START.format(walltime=walltime, address=self._nodes.address)
        said = self.say(f"{start}\ncluster.scale(jobs={jobs})")
        assert "Error" not in said, said

    def connect(self, walltime: str = "00:10:00") -> str:
        """Have the ranks on two nodes; return what the last cell showed."""
        self.submit(2, walltime)
        self.say("cluster.wait_for_workers(2, timeout=60)")
        return self.say("%parallel_cluster cluster")
