"""Uses of names by a cell about which ranks may have to say something."""

from __future__ import annotations

from nbparallel.session.names.cell_inputs import CellInputs
from nbparallel.session.names.encoding import Value
from nbparallel.session.names.free_names import FreeNames
from nbparallel.wire.name_updates import NameKind, NameUses

PREDEFINED_NAMES = frozenset((
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "dist", "gather", "irecv", "isend",
    "nbp", "rank", "recv", "reduce", "reduce_scatter", "rng", "scatter", "send", "sendrecv", "world_size",
))  # fmt: skip
"""What a rank finds defined without a line of the user's.

Written out, because the notebook would otherwise load all of `nbparallel.distributed` in its first cell, a
fifth of the time until it runs; a test compares it with the operations.
"""


def find_uses(free: FreeNames, inputs: CellInputs, earlier: set[str]) -> NameUses | None:
    """Return the uses of a cell with these names and values; None if there are none.

    `earlier` are the names that earlier cells have assigned; those of this one are added.
    """
    predefined = PREDEFINED_NAMES & (inputs.seen | free.assigned) - free.changed.deleted
    values, changed = inputs.values, free.changed
    stored, called = ([n for n in names if _is_copied(values.get(n))] for names in changed[:2])
    augmented = [name for name in changed.augmented if name in values]
    kept = sorted((earlier & values.keys()) - free.assigned)
    earlier |= free.assigned
    if not (predefined or stored or called or augmented or kept):
        return None
    return NameUses(tuple(sorted(predefined)), tuple(stored), tuple(called), tuple(augmented), tuple(kept))


def _is_copied(value: Value | None) -> bool:
    return value is not None and value.kind is NameKind.OBJECT
