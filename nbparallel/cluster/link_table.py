"""Links between hosts, as the kernel knows them: every two nodes are connected before a task begins."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from functools import partial

from nbparallel.cluster.contract import Cluster
from nbparallel.cluster.long_calls import perform_calls
from nbparallel.session.interrupts import InterruptCounter

LINK_SECONDS = 20.0
"""How long two workers may take to connect."""


class LinkTable:
    """Which hosts are connected."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pairs: set[tuple[str, str]] = set()

    def connect(self, hosts: Iterable[str], interrupts: InterruptCounter) -> None:
        """Connect every two of these hosts that are not.

        Raises
        ------
        StartError
            Two of them cannot reach each other; the message names both.
        """
        pairs = set(itertools.combinations(sorted(hosts), 2)) - self._pairs
        if pairs:
            link, abandoned = self._cluster.link, threading.Event()
            calls = {f"hosts {one} and {two}": partial(link, one, two, LINK_SECONDS) for one, two in pairs}
            perform_calls(calls, interrupts, abandoned)
            self._pairs |= pairs

    def lose(self, one: str, other: str) -> None:
        """Record that two hosts are not connected any more."""
        self._pairs.discard((min(one, other), max(one, other)))

    def forget(self, host: str) -> None:
        """Record that a host is lost."""
        self._pairs = {pair for pair in self._pairs if host not in pair}
