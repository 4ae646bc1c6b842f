"""The cluster inside of this process keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbparallel.cluster.contract import Cluster
from nbparallel.testing.clusters import ClusterTests, Loopback


class TestLoopback(ClusterTests):
    """Hosts as objects."""

    @pytest.fixture
    def cluster(self) -> Iterator[Loopback]:
        """Return three hosts, given out of order."""
        made = Loopback(["b", "c", "a"])
        yield made
        made.close()

    def lose(self, cluster: Cluster, host: str) -> None:
        """Lose the object."""
        assert isinstance(cluster, Loopback)
        cluster.lose(host)
