"""The current store: that of this process."""

from __future__ import annotations

import os

from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.locking import forked_error
from nbparallel.sharing.store import Store

_current: dict[str, Store] = {}
_session: dict[str, tuple[int, SegmentBroker]] = {}
"""What `begin_in_session` was given, and the process that called it."""


def current_store() -> Store:
    """Return this process's store, made on first use.

    Raises
    ------
    ForkedRankError
        This process was forked from the one that made it.
    """
    store = _current.get("store")
    if store is None:
        # `setdefault` is atomic: no lock that a fork could leave locked.
        store = _current.setdefault("store", _new_store())
    store.check_pid()
    return store


def set_current_store(store: Store) -> None:
    """Make `store` the one that `current_store` returns; a rank does so when it starts."""
    _current["store"] = store


def begin_in_session(broker: SegmentBroker) -> None:
    """Have `current_store` return a store of the broker's session, made on first use.

    Many a process that another one starts shares no array, and a store is a tenth of its start.
    """
    _session["begun"] = os.getpid(), broker
    _current.pop("store", None)  # its parent's, if this process was forked


def _new_store() -> Store:
    if not _session:
        return Store()
    owner, broker = _session["begun"]
    if os.getpid() != owner:
        raise forked_error(owner)
    store = Store(broker.client)
    store.connect(broker)
    return store
