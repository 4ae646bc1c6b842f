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

    task = -1
    """Number of the last task that was sent."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pairs: dict[tuple[str, str], int] = {}
        """By names in order: the last task that does not use their link."""

    def connect(self, hosts: Iterable[str], interrupts: InterruptCounter) -> None:
        """Connect every two of these hosts that are not.

        Raises
        ------
        StartError
            Two of them cannot reach each other; the message names both.
        """
        pairs = set(itertools.combinations(sorted(hosts), 2)) - self._pairs.keys()
        if pairs:
            link, abandoned = self._cluster.link, threading.Event()
            calls = {f"hosts {one} and {two}": partial(link, one, two, LINK_SECONDS) for one, two in pairs}
            perform_calls(calls, interrupts, abandoned)
            self._pairs |= dict.fromkeys(pairs, self.task)

    def lose(self, one: str, other: str, task: int) -> None:
        """Record that two hosts are not connected any more by the link that they have used since a task.

        Both say so: what the later one says is perhaps of a link that has been replaced since.
        """
        pair = min(one, other), max(one, other)
        if pair in self._pairs and task > self._pairs[pair]:
            del self._pairs[pair]

    def forget(self, host: str) -> None:
        """Record that a host is lost."""
        self._pairs = {pair: task for pair, task in self._pairs.items() if host not in pair}
