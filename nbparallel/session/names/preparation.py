"""What is known of a cell's names before it is sent: what it uses, and what each rank then needs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from nbparallel.session.names.cell_inputs import CellInputs
from nbparallel.session.names.free_names import FreeNames
from nbparallel.session.names.versions import PendingVersions
from nbparallel.wire.name_updates import NameUpdate, NameUses


@dataclass(frozen=True, slots=True)
class Preparation:
    """What has to happen on each rank before a cell."""

    updates: Mapping[int, tuple[NameUpdate, ...]]
    """Per rank, in the order in which to apply them."""
    notes: tuple[str, ...]
    """Lines for the user."""
    copied_nbytes: Mapping[str, int]
    """Bytes that were copied for this cell, per name; names without any are left out."""
    shared_nbytes: Mapping[str, int]
    """Bytes that the cell's ranks see in shared memory, per name."""
    keep: tuple[object, ...]
    """To be kept alive until the cell has ended: the updates refer to it."""
    moved_nbytes: Mapping[str, int]
    """Those of `copied_nbytes` that moved an array into shared memory, where it stays."""
    uses: NameUses | None
    """What ranks are to look at when the cell has ended."""
    pending: Mapping[int, PendingVersions]
    """What each rank has once it has applied its updates."""
    costly: frozenset[str]
    """Names that `notes` have a line about, which is shown once."""
    rebound: str = ""
    """A line on names of the notebook to which the cell assigns."""


@dataclass(slots=True)
class GatheredNames:
    """What a cell uses of the notebook; what each rank needs of it is found when the cell is sent."""

    free: FreeNames
    """The cell's names."""
    inputs: CellInputs
    """Their values."""
    notes: list[str]
    """Lines for the user."""
    namespace: MutableMapping[str, Any]
    """Where they were looked up."""
    bindings: Mapping[str, Any]
    """What it holds, or held when the cell was put into a queue."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """Of this cell among all."""

    @property
    def is_frozen(self) -> bool:
        """Whether the cell waits in a queue."""
        return self.bindings is not self.namespace
