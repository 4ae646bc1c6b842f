"""An idle rank says which names it has."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nbparallel import sharing
from nbparallel.engine import namespace
from nbparallel.transfer.variable_info import seen
from nbparallel.wire.inspection import Sighting

if TYPE_CHECKING:
    from nbparallel.engine.engine import Engine

MOST_NAMES = 1000
"""Names that are told; a table of more helps nobody."""


def look(engine: Engine, number: int) -> Sighting:
    """Return the names of this rank and how they look; never raises."""
    try:
        store, values = sharing.current_store(), engine.shell.user_ns.copy()  # threads may assign meanwhile
        table = namespace.names_of(engine.shell.user_ns)
        names = [
            name
            for name in engine.defaults.user_names()
            if name in values and not issubclass(type(values[name]), ModuleType)
        ]
        told = tuple(seen(name, values[name], store, table.origin(name)) for name in names[:MOST_NAMES])
        return Sighting(number, told, len(names) - len(told))
    except Exception as error:  # noqa: BLE001  a question must not end the rank
        return Sighting(number, (), 0, f"{type(error).__name__}: {error}")
