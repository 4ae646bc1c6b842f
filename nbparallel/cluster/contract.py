"""What a session needs of a cluster: hosts, a node on each, calls to nodes, events from them, links between.

All of it is bytes: an adapter interprets nothing.  `tests.harness.clusters.ClusterTests` checks one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

MOST_EVENT = 16 << 10
"""Bytes of an event: the cluster's middle may keep many of them."""
MOST_PIECE = 4 << 20
"""Bytes of a call: what is larger is sent in several, so that no process of the cluster holds all of it."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of the cluster."""

    name: str
    """What messages call it; unique in the cluster."""
    cpus: int
    """How many ranks the cluster means it to hold: threads of its workers."""


@dataclass(frozen=True, slots=True)
class NodeReply:
    """What became of a call on one host."""

    data: bytes = b""
    """What the node returned."""
    error: str = ""
    """What it raised instead, as text; empty: nothing."""
    silent: bool = False
    """Whether there was no answer in time; the call may still be performed."""


class EventHandler(Protocol):
    """The session, as an adapter sees it; called from any thread, for one host in order."""

    def event(self, host: str, data: bytes) -> None:
        """Take what a node has emitted."""

    def lost(self, host: str, reason: str) -> None:
        """Learn, once, that a node has ended although its anchor holds; no event of it comes after this."""


class Anchor(Protocol):
    """Holds a host and its node."""

    def release(self, *, give_up: bool = False) -> None:
        """End the node, and everything that it has started; does not wait (idempotent).

        With `give_up` the host has not answered: it is not listed any more until it is started anew.
        """


@runtime_checkable
class Cluster(Protocol):
    """A cluster, at the session's end; a `StartError` has the reason and names the hosts."""

    address: str
    """Where it is reached, and how: over ``tls://`` all that travels is encrypted."""

    def hosts(self) -> tuple[Host, ...]:
        """Return the machines that are there now, in order of their names."""

    def events(self, handler: EventHandler) -> None:
        """Pass to `handler` what nodes emit; called once, before the first anchor."""

    def anchor(self, host: str, node: str) -> Anchor:
        """Start a node, and hold its host until the anchor is released; StartError if that is impossible.

        What makes the node is `node`, as ``module:function``: it is called there with a `NodePort`.
        """

    def call(self, op: str, data: Mapping[str, bytes], timeout: float) -> dict[str, NodeReply]:
        """Have nodes handle calls, all at once, and return what each replied.

        Calls of one session to one node begin in order, and the next does not wait for the end of the one
        before.  With a `timeout` of 0 nothing is waited for.
        """

    def link(self, one: str, other: str, timeout: float) -> None:
        """Connect two nodes, whose ports have the ends from then on; StartError if they cannot be."""

    def close(self) -> None:
        """Release every anchor, wait a moment for the ends of nodes, forget the handler (idempotent)."""


class Link(Protocol):
    """One end of a connection between two nodes; `ChannelClosedError` when either has closed it, or ended."""

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send one frame of several buffers, which are the caller's again when this returns."""

    def receive(self, timeout: float) -> tuple[bytes | memoryview, ...]:
        """Return the buffers of the next frame, in order, also of one that came before a close.

        TimeoutError if none comes in time.
        """

    def close(self) -> None:
        """Close both ends (idempotent)."""


class NodePort(Protocol):
    """The cluster, as a node sees it."""

    host: str
    """The name of the node's host."""

    def emit(self, data: bytes) -> None:
        """Send an event of at most `MOST_EVENT` bytes to the session, in order."""

    def link(self, peer: str) -> Link:
        """Return the end of the link with another host's node; KeyError if there is none."""


class ClusterNode(Protocol):
    """What runs on a host."""

    def handle(self, op: str, data: bytes) -> bytes:
        """Handle a call; each is in a thread of its own."""

    def end(self) -> None:
        """End everything: the anchor was released, or the cluster is gone."""


def load_node(spec: str) -> Callable[[NodePort], ClusterNode]:
    """Return the function that ``module:function`` names."""
    module, _, name = spec.partition(":")
    return cast(Callable[[NodePort], ClusterNode], getattr(importlib.import_module(module), name))
