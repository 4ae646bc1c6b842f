"""Wait: what one wait of a rank is for, and how it may end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nbparallel.distributed.slots.slot_area import Area
from nbparallel.errors import NbParallelError
from nbparallel.wire.control import Operation


@dataclass(slots=True)
class Wait:
    """One wait that did not end at once."""

    operation: Operation
    awaited: Callable[[], list[int]]
    """Who is still missing, by their words; empty: the wait is over."""
    explain: Callable[[list[int]], NbParallelError]
    """The error when these have finished the cell without doing what is waited for."""
    line: int
    any_source: bool = False
    """One of the awaited is enough."""
    peer: int = -1
    tag: int = 0
    sequence: int = 0
    target: int = 0
    deadline_ns: int | None = None
    area: Area | None = None  # of the group that meets
    look: Callable[[], None] | None = None
    """Called in every slice: raises if what has arrived so far is wrong already."""
    began_ns: int = field(default_factory=time.monotonic_ns)
    suspicion: object = None
    """What the last look for a deadlock saw (`diagnosis`)."""
    suspected_ns: int = 0
