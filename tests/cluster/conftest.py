"""Real clusters of Dask, started once for a module; the tests say so where `distributed` is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.dask_cluster import DaskProcesses


@pytest.fixture(scope="module")
def dask() -> Iterator[DaskProcesses]:
    """Return a running cluster of the hosts a and b."""
    pytest.importorskip("distributed", reason="distributed is not installed: `make dask` puts it there")
    with DaskProcesses("ab") as processes:
        yield processes
