"""Real clusters of Dask, started once for a module; the tests say so where `distributed` is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import nbparallel as nbp
from tests.cluster.dask_cluster import DaskProcesses

MISSING = "distributed is not installed: `make dask` puts it there"


@pytest.fixture(scope="module", params=["tcp", "tls"])
def dask(request: pytest.FixtureRequest) -> Iterator[DaskProcesses]:
    """Return a running cluster of the hosts a and b."""
    pytest.importorskip("distributed", reason=MISSING)
    with DaskProcesses("ab", tls=request.param == "tls") as processes:
        yield processes


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest, dask: DaskProcesses) -> Iterator[nbp.Session]:
    """Return a session of four ranks on it: two on each host, or a test's number on the first."""
    first = getattr(request, "param", 2)
    with nbp.Session(4, cluster=dask.client, ranks_per_host=first) as session:
        session.run("pass")
        yield session


@pytest.fixture
def fresh() -> Iterator[DaskProcesses]:
    """Start a cluster that the test may break."""
    pytest.importorskip("distributed", reason=MISSING)
    with DaskProcesses("ab") as processes:
        yield processes
