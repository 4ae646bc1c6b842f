"""Uses of names by a cell about which ranks may have to say something."""

from __future__ import annotations

from collections.abc import Set

import nbparallel.distributed  # noqa: F401  its modules fill `PREDEFINED`
from nbparallel.distributed.api._operation import PREDEFINED
from nbparallel.wire.name_updates import NameUses

_PREDEFINED = frozenset({"rank", "world_size", "rng", "nbp", "dist", *PREDEFINED})


def find_uses(used: Set[str], assigned: Set[str]) -> NameUses | None:
    """Return the uses of a cell that reads and assigns these names; None if there are none.

    Parameters
    ----------
    used : set of str
        Names that the cell, and the functions that it uses, may take from the notebook.
    assigned : set of str
        Names that it binds or deletes.
    """
    predefined = _PREDEFINED & used | _PREDEFINED & assigned
    return NameUses(tuple(sorted(predefined))) if predefined else None
