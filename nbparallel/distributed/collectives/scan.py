"""scan and exscan: each rank's combination of its own array with those of all lower ranks.

They are `all_reduce`, whose bytes take the same routes, but for what each rank combines:

* small arrays: the slots up to its own;
* shared arrays: member i adds up slice i of all arrays, one after the other, and writes each sum on its way;
* others: piece by piece from rank to rank, all of which work at different pieces (`StagingBuffers.scan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.all_reduce import AllReduce, ReductionSignature
from nbparallel.distributed.collectives.direct import direct_scan
from nbparallel.distributed.collectives.scalars import combine_numbers
from nbparallel.distributed.collectives.staging import StagingBuffers
from nbparallel.distributed.operators import Operator, combine
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.wire.control import Operation


class Scan(AllReduce):
    """One rank's side of `scan` in a group, or of `exscan`, which leaves its own values out."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, staging: StagingBuffers, *, exclusive: bool
    ) -> None:
        super().__init__(context, protocol, staging, Operation.exscan if exclusive else Operation.scan)
        self._exclusive = exclusive
        self._count = self._index if exclusive else self._index + 1

    def run(self, x: Any, op: str, deadline_ns: int | None) -> Any:
        """Combine `x` of the lower ranks, and its own; None if there are none, and `x` is as before."""
        found = super().run(x, op, deadline_ns)
        return found if self._count else None

    def _combine_numbers(self, operator: Operator, values: Sequence[Any]) -> Any:
        return combine_numbers(operator, values[: self._count]) if self._count else None

    def _combine_slots(self, plan: ReductionSignature, views: list[AnyArray], x: AnyArray) -> None:
        inputs = views[: self._count]
        if len(inputs) == 1:
            x[...] = inputs[0]
        elif inputs:
            with np.errstate(all="ignore"):
                combine(plan.operator, inputs, x)

    def _combine_directly(self, plan: ReductionSignature, x: AnyArray) -> None:
        direct_scan(self._context, self._protocol, x, plan.operator, exclusive=self._exclusive)

    def _offer(self, source: AnyArray) -> bytes:
        return self._staging.offer_prefix(source)

    def _combine_staged(self, plan: ReductionSignature, source: AnyArray) -> None:
        self._staging.scan(source, plan.operator, exclusive=self._exclusive)
