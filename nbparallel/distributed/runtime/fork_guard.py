"""A forked child of a rank: what it inherits of the operations, made inert.

The child may be born in the middle of an operation, by a signal handler that forks and returns, and would
go on with it: writing the rank's words, and taking the rank's part in the next operation.  So whatever would
tell the other ranks something raises instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.waiting import Waiter
from nbparallel.errors import ForkedRankError


class ForkedWaiter(Waiter):
    """Waits for nobody and wakes nobody."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ForkedRankError(
            f"this process was forked from rank {self._rank} in the middle of an operation, and that is the "
            "rank's"
        )

    announce = announce_to = spin = spin_until = until = within = _refuse

    def ring(self, bits: int = 0) -> None:
        """Wake nobody."""


class ForkedRankContext(RankContext):
    """Is never ready, whatever an operation says when it ends."""

    inert = True

    @property
    def ready(self) -> bool:
        """False."""
        return False

    @ready.setter
    def ready(self, value: bool) -> None:
        pass  # the operation that the child was born into says that it has ended


def make_inert(context: RankContext) -> None:
    """Make what a forked child has of a rank inert."""
    context.forked()
    context.__class__ = ForkedRankContext
    context.waiter.__class__ = ForkedWaiter
