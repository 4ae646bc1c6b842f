"""Items of a map and their results, pickled one by one: a receiver rebuilds only those that it needs.

They travel together, in a list that is pickled as one message, so one segment holds the large buffers of all.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from nbparallel.errors import NbParallelError, UnpicklableError
from nbparallel.sharing import Store
from nbparallel.sharing.memory.mapping import Files
from nbparallel.transfer.pickle_format import is_plain
from nbparallel.transfer.pickling import serialise
from nbparallel.transfer.unpickling import own_globals, unpickle


class PickledItem(NamedTuple):
    """An item that needs our own pickler; a number or a short string is in the list as it is."""

    stream: bytes
    buffers: list[Any]
    """Large ones."""


def dump_item(
    obj: Any,
    name: str,
    store: Store,
    broker: Any,
    *,
    main_globals: Mapping[str, Any] | None = None,
    copy: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """Return an object as an item, and shared arrays to be held until the receivers have loaded it.

    Parameters
    ----------
    name : str
        The user's word for it, for errors.
    copy : bool
        Copy large buffers now, because the object may change before the message is made: it is a result.

    Raises
    ------
    UnpicklableError
        It cannot travel.
    """
    if is_plain(obj):
        return obj, ()
    files = None if copy else Files.SHARED
    try:
        made = serialise(obj, store, broker=broker, main_globals=main_globals, files=files)
    except UnpicklableError as error:
        raise UnpicklableError(f"{name}: {error}") from error.__cause__
    # of an array, not of a memoryview: in the cycle of an error's traceback the collector would end the
    # process when it clears a memoryview that is exported
    memories: list[Any] = [
        bytearray(part) if copy else np.frombuffer(part, np.uint8) for part in made.buffers
    ]
    buffers = [pickle.PickleBuffer(memory) for memory in memories]
    return PickledItem(bytes(made.with_sources()), buffers), tuple(made.arrays)


def load_item(item: Any, store: Store, *, broker: Any = None, name: str = "an object") -> Any:
    """Rebuild an object; UnpicklableError if its own code raised: that is the cause."""
    if type(item) is not PickledItem:
        return item
    try:
        return unpickle(item.stream, item.buffers, store, broker, own_globals(), match_classes=True)
    except (NbParallelError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        text = f"{name} could not be rebuilt in this process: {type(error).__name__}: {error}"
        raise UnpicklableError(f"{text}; see the cause for the line that raised") from error
