"""Withdrawal: a rank lets go of what the notebook delivered of one segment, and says what still holds it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np

from nbparallel import sharing
from nbparallel.engine import namespace
from nbparallel.sharing import Store

if TYPE_CHECKING:
    from nbparallel.engine.engine import Engine

_DEPTH = 3
"""How deep lists, dictionaries and attributes are searched for what holds an array; arbitrary."""


def withdraw(engine: Engine, segment: int) -> list[str]:
    """Let go of a segment's delivered arrays; return what still looks at its memory, for the user."""
    store = sharing.current_store()
    if engine.communicator is not None:
        engine.communicator.release()
    namespace.names_of(engine.shell.user_ns).withdraw(segment)
    if not _is_held(store, segment):
        return []
    gc.collect()
    if not _is_held(store, segment):
        return []
    found = [f"`{name}`" for name in engine.defaults.user_names() if _shows(engine, name, segment, store)]
    return found or ["something that is no variable (a message not received yet, a generator, a closure …)"]


def _is_held(store: Store, segment: int) -> bool:
    store.drain()
    return any(record.segment == segment for record in store.segments())


def _shows(engine: Engine, name: str, segment: int, store: Store) -> bool:
    return _looks_at(engine.shell.user_ns[name], segment, store, _DEPTH)


def _looks_at(value: Any, segment: int, store: Store, depth: int) -> bool:
    if isinstance(value, memoryview):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        place = store.location(value)
        return place is not None and place.segment == segment
    if not depth:
        return False
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []
    return any(_looks_at(part, segment, store, depth - 1) for part in parts)
