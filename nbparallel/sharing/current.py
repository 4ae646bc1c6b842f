"""The current store: that of this process."""

from __future__ import annotations

from nbparallel.sharing.store import Store

_current: dict[str, Store] = {}


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
        store = _current.setdefault("store", Store())
    store.check_pid()
    return store


def set_current_store(store: Store) -> None:
    """Make `store` the one that `current_store` returns; a rank does so when it starts."""
    _current["store"] = store
