"""Hosts with networks of their own, whose links can be taken down: a Dask cluster on machines of namespaces.

They share everything but the network.
"""

from __future__ import annotations

from typing import Any

from tests.cluster.dask_cluster import DaskProcesses
from tests.cluster.machines.machines import Network

KERNEL, SCHEDULER = "k", "scheduler"
"""The hosts of the notebook's process, and of the scheduler."""


class NetworkedDask(DaskProcesses):
    """A cluster whose hosts a and b, and that of the notebook, are only connected by cables."""

    def __init__(self) -> None:
        self._network = Network(SCHEDULER, "a", "b", KERNEL)
        try:
            super().__init__("ab")
        except BaseException:
            self._network.stop()
            raise

    def take_down(self, host: str) -> None:
        """Have nothing pass from or to a host any more."""
        self._network.set_link(host, "down")

    def address(self, host: str = "") -> str:
        """Return the address of a host, or of the scheduler's."""
        return self._network.machines[host or SCHEDULER].address

    def prefix(self, name: str) -> list[str]:
        """Return the words that have a command run on the host of a process."""
        return self._network.machines[name].prefix(network_only=True)

    def connect(self) -> Any:
        """Return nothing: the tests' own process is not in these networks."""
        return None

    def await_workers(self, count: int) -> None:
        """Leave that to the notebook's process."""

    def stop(self) -> None:
        """End all of them."""
        try:
            super().stop()
        finally:
            self._network.stop()
