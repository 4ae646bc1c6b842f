"""Stores of shared arrays in tests: what one holds, and changes that users cannot make."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

from nbparallel.channel.channel import SegmentClient
from nbparallel.sharing import SegmentBroker, Store, current_store, store
from nbparallel.supervisor.sweep import look


class StoreUsage(NamedTuple):
    """Mappings of one process's store."""

    used: int
    """Segments that are mapped because arrays use them."""
    addresses: int
    """Address ranges in which arrays are found; fewer than `used` by private mappings."""
    kept: int
    """Mappings of other processes' memory that no array uses, kept for the next one."""
    kept_nbytes: int
    """Their size in bytes."""
    pooled: int
    """Own segments that no array uses, kept for the next one."""

    @property
    def mapped(self) -> int:
        """All segments that are mapped."""
        return self.used + self.kept + self.pooled


def store_usage(store: Store | None = None) -> StoreUsage:
    """Count the mappings of a store, by default this process's."""
    table = (store or current_store())._table
    addresses = len(table._address_map._entries)
    return StoreUsage(
        len(table._by_mapping), addresses, len(table.cache), table.cache.nbytes, len(table.pool)
    )


def store_brokers(store: Store | None = None) -> tuple[SegmentBroker, ...]:
    """Return the brokers of the sessions that a store is in."""
    return tuple((store or current_store())._table.brokers)


def broker_socket(broker: SegmentBroker) -> socket.socket:
    """Return another socket on the connection of a broker with its supervisor: for what no broker sends."""
    assert isinstance(broker, SegmentClient), "only a session's broker has a connection"
    return socket.socket(fileno=os.dup(broker.fileno()))


def mark_interrupted(store: Store) -> None:
    """Have the next operation check every segment, as after an interrupt."""
    store._table.doubtful = True


def has_store() -> bool:
    """Return whether this process has made its store."""
    return bool(store._current)


def locked_store(store: Store) -> AbstractContextManager[bool]:
    """Hold a store's lock, as an operation of another thread does."""
    return store._lock


def names_of(notebook: int, places: Iterable[str] | None = None) -> list[str]:
    """Return the paths of all names of a notebook (or script) and its ranks, sorted.

    Parameters
    ----------
    notebook : int
        Its process id.
    places : iterable of path, optional
        Where to look; by default where a sweep does.
    """
    found = look(places)
    return sorted(name.path for name in found if name.notebook == notebook)
