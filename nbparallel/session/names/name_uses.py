"""Uses of names by a cell about which ranks may have to say something."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from nbparallel.session.names.cell_inputs import CellInputs
from nbparallel.session.names.encoding import Value
from nbparallel.session.names.free_names import FreeNames, is_ipythons
from nbparallel.transfer.variable_info import advice_to_bring
from nbparallel.wire.name_updates import NameKind, NameUses

PREDEFINED_NAMES = frozenset((
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "dist", "gather", "irecv", "isend",
    "nbp", "rank", "recv", "reduce", "reduce_scatter", "rng", "scatter", "send", "sendrecv", "world_size",
))  # fmt: skip
"""What a rank finds defined without a line of the user's.

Written out, because the notebook would otherwise load all of `nbparallel.distributed` in its first cell, a
fifth of the time until it runs; a test compares it with the operations.
"""


SHOWN = 5
"""Names that one line lists."""


def find_uses(
    free: FreeNames, inputs: CellInputs, earlier: set[str], bindings: Mapping[str, Any]
) -> NameUses | None:
    """Return the uses of a cell with these names and values; None if there are none.

    `earlier` are the names that earlier cells have assigned; those of this one are added.
    """
    predefined = PREDEFINED_NAMES & (inputs.seen | free.assigned) - free.changed.deleted
    values, changed = inputs.values, free.changed
    stored, called = ([n for n in names if _is_copied(values.get(n))] for names in changed[:2])
    augmented = [name for name in changed.augmented if name in values]
    kept = sorted((earlier & values.keys()) - free.assigned - inputs.by_word)
    earlier |= free.assigned
    strings = (inputs.words & bindings.keys()) - values.keys() - free.assigned - PREDEFINED_NAMES
    found = (
        sorted(predefined), stored, called, augmented, kept,
        sorted(name for name in strings if not is_ipythons(name)),
    )  # fmt: skip
    return NameUses(*map(tuple, found)) if any(found) else None


def describe_rebound(free: FreeNames, bindings: Mapping[str, Any]) -> str:
    """Return a line on names to which a cell assigns and that the notebook has too; empty: there are none.

    It is about values: what a notebook imports or defines, a cell for ranks often imports or defines again.
    """
    names = sorted(
        name
        for name in free.changed.rebound & bindings.keys()
        if not (is_ipythons(name) or callable(bindings[name]) or isinstance(bindings[name], ModuleType))
    )
    if not names:
        return ""
    listed = ", ".join(names[:SHOWN]) + " …" * (len(names) > SHOWN)
    theirs = "'s are" if len(names) > 1 else f"'s {listed} is"
    return (
        f"this rank assigned {listed}, and the notebook{theirs} as before: "
        f"{advice_to_bring(names[0], bindings[names[0]])}"
    )


def _is_copied(value: Value | None) -> bool:
    return value is not None and value.kind is NameKind.OBJECT
