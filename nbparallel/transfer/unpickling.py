"""Unpickling: our placeholders in a pickle stream stand for shared arrays, and for what the receiver has."""

from __future__ import annotations

import io
import pickle
from functools import partial
from typing import Any

import numpy as np

from nbparallel.sharing import Store
from nbparallel.sharing.tensor_storage import shared_storage
from nbparallel.transfer import cell_sources, definitions
from nbparallel.transfer.tensor_pickling import Ties
from nbparallel.wire.name_updates import ArrayHandle


class _Unpickler(pickle.Unpickler):
    """Resolves our placeholders; `resolved` must not refer to it, see `pickling._take_buffer`."""

    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[memoryview],
        resolved: dict[str, Any],
        main_globals: dict[str, Any],
    ) -> None:
        super().__init__(file, buffers=buffers)
        self.resolved, self.main_globals = resolved, main_globals

    def find_class(self, module: str, name: str) -> Any:
        if module == definitions.__name__ and name in self.resolved:
            return self.resolved[name]
        if module == "__main__" and name.partition(".")[0] in self.main_globals:
            found = self.main_globals[name.partition(".")[0]]
            for attribute in name.split(".")[1:]:
                found = getattr(found, attribute)
            return found
        return super().find_class(module, name)


def _resolved(
    store: Store, broker: Any, main_globals: dict[str, Any], *, match_classes: bool, ties: Ties
) -> dict[str, Any]:
    """Return what stands behind the placeholders of `definitions` in this process."""

    def attach(fields: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        handle = ArrayHandle(*fields)
        return store.attach(handle, writable=handle.writable, broker=broker)

    return {
        "attach": attach,
        "attach_private": lambda fields: store.attach(ArrayHandle(*fields), private=True, broker=broker),
        "attach_storage": lambda fields: shared_storage(attach(fields)),
        "rebuild_function": partial(definitions.make_function, main_globals),
        "rebuild_class": partial(definitions.make_class, main_globals if match_classes else {}),
        "set_class_state": definitions.complete_class,
        "class_reference": definitions.find_class,
        "rebuild_tensor": ties.rebuild,
    }


def own_globals() -> dict[str, Any]:
    """Return the namespace that stands for the sender's: a rank's own, else that of ``__main__``."""
    found = definitions.current_main_globals()
    return __import__("__main__").__dict__ if found is None else found


def unpickle(
    stream: Any,
    buffers: list[Any],
    store: Store,
    broker: Any,
    main_globals: Any,
    *,
    match_classes: bool,
    ties: Ties | None = None,
) -> Any:
    """Rebuild what `serialise` took apart; raises whatever the object's own code raises."""
    ties = Ties({}, {}) if ties is None else ties
    resolved = _resolved(store, broker, main_globals, match_classes=match_classes, ties=ties)
    stream = cell_sources.take_off(memoryview(stream))
    return _Unpickler(io.BytesIO(stream), buffers, resolved, main_globals).load()
