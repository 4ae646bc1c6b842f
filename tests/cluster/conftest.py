"""Two hosts that are objects of this process, and a Slurm cluster, each started once for a module."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import nbparallel as nbp
from tests.cluster.machines.machines import missing_reason
from tests.cluster.machines.slurm_nodes import PROGRAMS, SlurmNodes
from tests.harness.clusters import Loopback


@pytest.fixture(scope="module")
def hosts() -> Iterator[nbp.Session]:
    """Return a session with ranks 0-1 on host a and ranks 2-3 on host b."""
    with nbp.Session(cluster=Loopback(["b", "a"])) as session:
        session.run("pass")
        yield session


@pytest.fixture(scope="session")
def needs_slurm() -> None:
    """Skip where Slurm cannot run."""
    if find_spec("dask_jobqueue") is None:  # an import would have Ctrl-C raise SystemExit in this process
        pytest.skip("dask-jobqueue is not installed: `make dask` puts it there")
    if (reason := missing_reason(*PROGRAMS)) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def slurm(needs_slurm: None) -> Iterator[SlurmNodes]:
    """Return a Slurm cluster of the nodes n1 and n2."""
    with SlurmNodes() as nodes:
        yield nodes
