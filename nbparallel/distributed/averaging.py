"""average_gradients in a group: comparing what the ranks pass costs no meeting of its own.

Nearly always nobody has weights, and no rank passes memory that another one could pass too.  Then all there
is to compare are the forms of the arrays, and they stand in the fingerprint of the first reduction.  Who has
more to say (`careful`) says it in his slot instead, with the content of all arrays if they are small.  If
some do this and some that, or the forms differ, all ranks see it before anything is written; they leave that
meeting, and all say it.
"""

from __future__ import annotations

from typing import Any

from nbparallel.distributed.collectives.all_reduce import AllReduce, ReductionSignature
from nbparallel.distributed.collectives.movements import Gathering
from nbparallel.distributed.data_parallel.gradients import (
    Gradients,
    average,
    average_riding,
    check_announcements,
    mismatch,
    packed,
    unpack,
)
from nbparallel.distributed.operators import OPERATORS
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.slots.fingerprint import fingerprint
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.wire.control import Operation
from nbparallel.wire.segments import CLIENT_SHIFT

MAX_PLANS = 64


class Averaging:
    """One rank's side of `average_gradients` in a group."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, all_reduce: AllReduce, gathering: Gathering
    ) -> None:
        self._context, self._protocol = context, protocol
        self._all_reduce, self._gathering = all_reduce, gathering
        self._plans: dict[bytes, ReductionSignature] = {}

    def __call__(self, gradients: Gradients, deadline_ns: int | None) -> None:
        """Replace all arrays by their averages."""
        buckets, first = gradients.plan.buckets, gradients.plan.first
        careful = gradients.weight is not None or not buckets or not self._alone(gradients.arrays)
        if not careful:
            bucket = gradients.bucket(first)
            flat = packed(bucket)
            plan = self._plans.get(gradients.plan.digest) or self._plan(gradients, flat)
            if self._all_reduce.run_plan(flat, plan, deadline_ns):
                unpack(flat, bucket)
                if len(buckets) > 1:
                    average(gradients, None, self._all_reduce, deadline_ns, first)
                return
        self._with_words(gradients, deadline_ns, again=not careful)

    def _alone(self, arrays: list[AnyArray]) -> bool:
        """Whether no other rank has any of this memory, unless it says so: it is private, or made here."""
        for x in arrays:
            if x.base is not None:
                place = self._context.memory.place(x)
                if place is not None and place.segment >> CLIENT_SHIFT != self._context.store.client:
                    return False
        return True

    def _plan(self, gradients: Gradients, flat: AnyArray) -> ReductionSignature:
        """Return the plan of the first reduction, with the fingerprint of all arrays."""
        digest, shown = gradients.plan.digest, gradients.arrays[0]
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        plan = ReductionSignature(OPERATORS["avg"], flat.dtype, flat.shape, self._all_reduce.inline_nbytes)
        plan.operation, plan.lenient = Operation.average_gradients, True
        plan.fingerprint = fingerprint(
            "average_gradients", str(shown.dtype), str(shown.shape), content=("forms", digest)
        )
        self._plans[digest] = plan
        return plan

    def _with_words(self, gradients: Gradients, deadline_ns: int | None, *, again: bool) -> None:
        """Average after all ranks have said what they pass."""
        shown = gradients.arrays[0] if gradients.arrays else None
        own = gradients.announcement(self._context.memory)

        def tell(value: Any) -> list[Any]:
            return self._gathering.tell(Operation.average_gradients, shown, value, deadline_ns)

        brought = own + gradients.riding()
        agreed, told = self._exchange(brought, deadline_ns)
        if not agreed:
            assert not again, "everybody is careful the second time"
            agreed, told = self._exchange(brought, deadline_ns)
        same, total = check_announcements(tell(own) if told is None else told, self._protocol.ranks)
        if not same:
            raise mismatch(tell((gradients.forms(), gradients.bucket_nbytes)), self._protocol.ranks)
        if told is not None and gradients.plan.rides:
            average_riding(gradients, total, told)
        else:
            average(gradients, total, self._all_reduce, deadline_ns)

    def _exchange(self, data: bytes, deadline_ns: int | None) -> tuple[bool, list[bytes] | None]:
        """Return whether all are careful, and what they bring; None if one's does not fit into a slot."""
        context, protocol = self._context, self._protocol
        protocol.deadline_ns = deadline_ns
        protocol.begin(Operation.average_gradients, _CAREFUL, context.call_site.line())
        protocol.put(b"+" + data if len(data) < protocol.payload_nbytes else b"-")
        agreed = protocol.arrive_and_wait() or protocol.agree()
        found = [bytes(protocol.get(i)) for i in range(len(protocol.ranks))] if agreed else []
        protocol.end()
        context.operations += 1
        return agreed, [left[1:] for left in found] if all(left[:1] == b"+" for left in found) else None


_CAREFUL = fingerprint("average_gradients", content="said")
