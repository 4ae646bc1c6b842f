"""Slurm and ssh on machines of namespaces; the tests say so where something is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.machines.machines import missing_reason
from tests.cluster.machines.notebooks import SlurmNotebook
from tests.cluster.machines.slurm_nodes import PROGRAMS, SlurmNodes


@pytest.fixture(scope="package")
def slurm() -> Iterator[SlurmNodes]:
    """Return a Slurm cluster of the nodes n1 and n2."""
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed: `make dask` puts it there")
    if (reason := missing_reason(*PROGRAMS)) is not None:
        pytest.skip(reason)
    with SlurmNodes() as nodes:
        yield nodes


@pytest.fixture
def notebook(slurm: SlurmNodes) -> Iterator[SlurmNotebook]:
    """Return a notebook with a cluster of no jobs yet; afterwards nothing is left on any node."""
    try:
        with SlurmNotebook(slurm) as kernel:
            yield kernel
        slurm.await_nothing_left()
    finally:
        slurm.end_jobs()
