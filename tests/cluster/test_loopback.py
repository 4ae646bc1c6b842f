"""The cluster inside of this process keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbparallel.cluster.contract import Cluster
from tests.harness.clusters import ECHO, ClusterTests, Loopback
from tests.harness.clusters.conformance import Recorder
from tests.harness.clusters.loopback import LoopbackHost


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


def test_a_call_that_comes_as_its_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered: nothing handles it."""
    cluster, begin = Loopback(["a"]), LoopbackHost.begin

    def begin_late(host: LoopbackHost, *call: Any) -> None:
        host.release()
        begin(host, *call)

    cluster.events(Recorder())
    cluster.anchor("a", ECHO)
    monkeypatch.setattr(LoopbackHost, "begin", begin_late)
    reply = cluster.call("echo", {"a": b""}, 20)["a"]
    assert (reply.error, reply.silent) == ("the host is lost", False)
    cluster.close()
