"""Hosts with networks of their own, whose links can be taken down: network namespaces on one machine.

Some facts (network_namespaces(7), ip-netns(8), veth(4)):

* ``ip netns exec`` becomes the command that it runs: its process is the one that was started;
* a veth pair is a cable: if one end is down, nothing passes, and no peer is told;
* a namespace in use goes with its last process; its name goes at once.

Every host has a cable to a bridge, which is in a namespace as well: no interface or rule of the machine's own
network plays a part.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

from tests.cluster.dask_cluster import DaskProcesses

KERNEL = "k"
"""The host of the notebook's process."""


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(words)}: {error.stderr.strip()}") from error


def missing_reason() -> str | None:
    """Return why no network namespace can be made here, or None."""
    if os.getuid():
        return "only root makes network namespaces"
    name = f"nbp-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
            _ip("netns", "exec", name, "true")
        finally:
            _ip("netns", "delete", name)
    except OSError as error:
        return f"network namespaces cannot be made: {error} (Debian's package iproute2 has `ip`)"
    return None


class NetworkedDask(DaskProcesses):
    """A cluster whose hosts a and b, and that of the notebook, are only connected by cables."""

    def __init__(self) -> None:
        self._made: list[str] = []
        try:
            self._make_networks()
            super().__init__("ab")
        except BaseException:
            self._remove_networks()
            raise

    def _space(self, host: str) -> str:
        return f"nbp-{os.getpid()}-{host or 'hub'}"

    def _make_networks(self) -> None:
        hub = self._space("")
        for host in ("", "a", "b", KERNEL):
            space = self._space(host)
            _ip("netns", "add", space)
            self._made.append(space)
            _ip("-n", space, "link", "set", "lo", "up")
            device = "cable" if host else "bridge"
            if host:
                port = f"to-{host}"
                _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", device, "netns", space)
                _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            else:
                _ip("-n", hub, "link", "add", device, "type", "bridge")
            _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", device)
            _ip("-n", space, "link", "set", device, "up")

    def take_down(self, host: str) -> None:
        """Have nothing pass from or to a host any more."""
        _ip("-n", self._space(host), "link", "set", "cable", "down")

    def address(self, host: str = "") -> str:
        """Return the address of a host, or of the scheduler's."""
        return f"10.77.0.{1 + ' abk'.index(host or ' ')}"

    def prefix(self, name: str) -> list[str]:
        """Return the words that have a command run on the host of a process."""
        return ["ip", "netns", "exec", self._space("" if name == "scheduler" else name)]

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
            self._remove_networks()

    def _remove_networks(self) -> None:
        while self._made:
            _ip("netns", "delete", self._made.pop())
