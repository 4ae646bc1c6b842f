"""A forked child of a rank: what it inherits of the operations, made inert.

The child may be born in the middle of an operation, by a signal handler that forks and returns, and would
go on with it: writing the rank's words, and taking the rank's part in the next operation.  So everything that
would notify other ranks raises `ForkedRankError` instead.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.waiting import Waiter
from nbparallel.errors import ForkedRankError


class ForkedWaiter(Waiter):
    """A waiter that neither waits nor wakes: it raises `ForkedRankError`."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ForkedRankError(
            f"this process was forked from rank {self._rank} in the middle of an operation, and that is the "
            "rank's"
        )

    announce = announce_to = spin = spin_until = until = within = _refuse

    def ring(self, bits: int = 0) -> None:
        """Do nothing."""


def make_inert(context: RankContext) -> RankContext:
    """Make a forked child's copy of a context inert; returns the context for operations that begin later.

    Notes
    -----
    That is another object because the operation that the child was born into holds the old one, and marks it
    as ready when it ends.  The waiter changes its class because every object of the operations holds it, and
    a check for each word that is announced would cost each operation of each rank.
    """
    context.forked = True
    context.ready = False
    context.waiter.__class__ = ForkedWaiter
    return copy.copy(context)
