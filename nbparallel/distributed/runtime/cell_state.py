"""Cell state: what a rank keeps of the cell that it takes part in, and the functions that its waits call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nbparallel.distributed.runtime.host_boundary import boundary_error, elsewhere
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.errors import rank_list
from nbparallel.wire.identity import WorldPlace


def _nothing(*_: object) -> None:
    """Do nothing: the default of every hook."""


@dataclass(slots=True)
class CellState:
    """One rank's part in one cell; `RankContext.begin_cell` makes a new one.

    Attributes
    ----------
    ranks, peers : tuple of int
        The ranks of the cell; and without this one.
    go_on : bool
        A failure only ends waits for the rank that failed.
    began_ns : int
        When it began; 0: no cell runs.
    statement, last_line : int
        First and last line of the statement that runs.
    by_item : bool
        The ranks map a function over items, each at its own.
    """

    number: int = 0
    filename: str = ""
    ranks: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    go_on: bool = False
    began_ns: int = 0
    statement: int = 0
    last_line: int = 0
    by_item: bool = False

    def not_whole(self, world_size: int, hosts: WorldPlace | None = None) -> Exception:
        """Return why an operation on the world cannot begin here."""
        if self.by_item:
            return RuntimeError(
                "the ranks of `map` are at items of their own, so that an operation between them would wait "
                "for ranks that never call it, or combine items that happen to meet: return a value for each "
                "item, and combine the list that `map` returns"
            )
        missing = [rank for rank in range(world_size) if rank not in self.ranks]
        if hosts is not None and (others := elsewhere(hosts, missing)):
            return boundary_error(hosts, others, "an operation on the world that is called")
        verb = "is" if len(missing) == 1 else "are"
        return ValueError(
            f"{rank_list(missing)} {verb} not in this cell, and an operation on the world needs all ranks"
        )

    def how_gone(self, rank: int, what: str) -> str:
        """Return why a rank that does nothing more will not receive something, as the end of a sentence."""
        if rank in self.ranks:
            return f"finished the cell without receiving {what}"
        return f"is not in this cell, and cannot receive {what}"


@dataclass(slots=True)
class RankHooks:
    """What a wait calls of the layers above.

    Attributes
    ----------
    progress
        Called in every slice of a wait: goes on with what other ranks need of this one.
    diagnose
        Called in every slice of a wait: raises if it is part of a deadlock.
    waited
        Called at the end of every wait, with the rank that was waited for.
    """

    progress: Callable[[], None] = _nothing
    diagnose: Callable[[WaitRecord], None] = _nothing
    waited: Callable[[WaitRecord, int], None] = _nothing
