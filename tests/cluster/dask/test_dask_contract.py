"""Dask's cluster keeps the contract: real scheduler, real workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbparallel.cluster.contract import Cluster
from tests.cluster.dask_cluster import DaskProcesses
from tests.harness.clusters import ClusterTests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.time_limit(120),
    pytest.mark.may_leave("descriptor", reason="the client keeps connections with the scheduler"),
]


@pytest.fixture(scope="module")
def many() -> Iterator[DaskProcesses]:
    """Return a cluster of more workers than tests of this module kill, and two."""
    pytest.importorskip("distributed", reason="distributed is not installed: `make dask` puts it there")
    with DaskProcesses("abcde") as processes:
        yield processes


class TestDask(ClusterTests):
    """Workers on addresses of their own."""

    @pytest.fixture
    def cluster(self, many: DaskProcesses) -> Iterator[Any]:
        """Return the adapter."""
        from nbparallel.cluster.dask.dask_cluster import DaskCluster

        self.processes = many
        adapter = DaskCluster(many.client)
        yield adapter
        adapter.close()

    def lose(self, cluster: Cluster, host: str) -> None:
        """Kill the worker's process."""
        self.processes.kill(host)


def test_all_hosts_while_the_client_renews_what_it_knows(many: DaskProcesses) -> None:
    """It does so by itself every two seconds, here all the time, and then knows no worker."""
    import dask

    from nbparallel.cluster.dask.dask_cluster import DaskCluster

    there = sorted(worker["name"] for worker in many.workers().values())
    with dask.config.set({"distributed.client.scheduler-info-interval": "1ms"}), many.connect() as client:
        adapter = DaskCluster(client)
        for _ in range(100):
            assert [host.name for host in adapter.hosts()] == there
        adapter.close()
