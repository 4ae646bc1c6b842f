"""Notebooks on the machine where people log in, with a cluster of Slurm's jobs, or over ssh."""

from __future__ import annotations

from tests.cluster.machines.slurm_nodes import SlurmNodes
from tests.cluster.machines.ssh_machines import SshMachines
from tests.harness.kernel import Kernel

CELL_SECONDS = 90.0
_LOAD = """
%load_ext nbparallel
%config NbParallel.welcome = False
import os, time
import numpy as np
"""
SLURM_CLUSTER = """
from dask_jobqueue import SLURMCluster
cluster = SLURMCluster(
    cores={cores}, memory="1GB", walltime="{walltime}", processes=1,
    scheduler_options={{"host": "{address}", "dashboard_address": ":0"}},
    job_extra_directives=["--nodes=1", "--output=/dev/null", *{directives}],
)
cluster.scale(jobs={jobs})
"""
SSH_CLUSTER = """
from distributed import SSHCluster
cluster = SSHCluster(
    {addresses}, connect_options={{"client_keys": "{key}", "known_hosts": None, "username": "root"}},
    worker_options={{"nthreads": 2}}, scheduler_options={{"dashboard_address": ":0"}},
)
%parallel_cluster cluster
"""


def slurm_cluster(
    address: str, jobs: int, *directives: str, cores: int = 2, walltime: str = "00:10:00"
) -> str:
    """Return the code that makes a cluster of Slurm's jobs; its scheduler is at an address."""
    return SLURM_CLUSTER.format(
        address=address, jobs=jobs, directives=list(directives), cores=cores, walltime=walltime
    )


class ClusterNotebook(Kernel):
    """A kernel whose cells are about a cluster."""

    def say(self, code: str) -> str:
        """Run a cell; return all that it showed."""
        return self.run(code, CELL_SECONDS).text


class SlurmNotebook(ClusterNotebook):
    """`submit` makes its variable `cluster`."""

    def __init__(self, nodes: SlurmNodes) -> None:
        super().__init__(env=nodes.environment, cwd=nodes.home / "jobs")
        self._address = nodes.address

    def submit(self, jobs: int, *directives: str, cores: int = 2, walltime: str = "00:10:00") -> None:
        """Submit jobs for a cluster."""
        said = self.say(
            _LOAD + slurm_cluster(self._address, jobs, *directives, cores=cores, walltime=walltime)
        )
        assert "Error" not in said, said

    def connect(self, jobs: int = 2, *directives: str, cores: int = 2, walltime: str = "00:10:00") -> str:
        """Have the ranks on nodes; return what the last cell showed."""
        self.submit(jobs, *directives, cores=cores, walltime=walltime)
        self.say(f"cluster.wait_for_workers({jobs}, timeout=60)")
        return self.say("%parallel_cluster cluster")


class SshNotebook(ClusterNotebook):
    """`connect` makes its variable `cluster`."""

    def __init__(self, machines: SshMachines) -> None:
        super().__init__(cwd=machines.home)
        self._machines = machines

    def connect(self) -> str:
        """Have the ranks on both machines; return what the cell showed."""
        addresses = [self._machines.machines[name].address for name in ("s1", "s1", "s2")]
        return self.say(_LOAD + SSH_CLUSTER.format(addresses=addresses, key=self._machines.key))
