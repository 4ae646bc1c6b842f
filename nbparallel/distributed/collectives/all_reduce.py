"""all_reduce: the route of the bytes.

Small arrays and numbers go through the slots: one synchronization, and every rank combines all slots itself.
Larger arrays go directly (`direct`) if every rank's array lies in shared memory; each rank reads the others'
where they lie (`in_place`) if all are private and large; else they are copied piece by piece into shared
memory, and combined there directly.  All ranks read the same bits in all slots, so they choose the same
route.
"""

from __future__ import annotations

import functools
import marshal
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.direct import KeptBuffer, attached_arrays, direct_all_reduce
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.operators import Operator, combine, find_operator, operator_for, shown_dtype
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, SharedSpan, as_operand, read_only
from nbparallel.distributed.slots.fingerprint import (
    DIRECT,
    READABLE,
    SHARED,
    Fingerprint,
    Route,
    choose_route,
    fingerprint,
    offers_differ,
)
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.errors import IN_PLACE, ReadOnlyArrayError
from nbparallel.wire.control import GENERATIONS, Operation

# Numbers: their exchange through the slots, the fastest way from all to all, and their combination.


def check_number(op: Operator, x: Any, operation: str) -> Any:
    """Return a number as an operation takes it: a bool counts as an int.

    Raises
    ------
    TypeError
        `x` is not a number, or the operator needs integers.
    """
    if not isinstance(x, int | float | complex | np.number | np.bool_):
        # a frame or a column of pandas has `to_numpy`; what that gives may be read-only, a copy is not
        convertible = isinstance(x, list | tuple) or hasattr(x, "to_numpy")
        hint = "use np.array(x)" if convertible else "all_gather(x) gives those of all ranks, to combine"
        raise TypeError(f"{operation} needs an array or a number, not {type(x).__name__}: {hint}")
    if isinstance(x, bool | np.bool_):
        return int(x)
    if not {"f", "c"} & set(op.kinds) and not isinstance(x, int | np.integer):
        raise TypeError(f"op={op.name!r} needs integers, not {type(x).__name__}")
    return x


def combine_numbers(op: Operator, values: Sequence[Any]) -> Any:
    """Return the combination of numbers in rank order; ints stay exact."""
    total = functools.reduce(op.pair, values)
    return total if op.finish is None else op.finish(total, len(values))


def exchange_numbers(
    context: RankContext, protocol: SlotProtocol, operation: Operation, label: Fingerprint, value: Any
) -> list[Any]:
    """Return the values of all members; each is a number, or anything else that fits into a slot."""
    # marshal for Python's own numbers, pickle for numpy's
    own = type(value) in (int, float, complex)
    packed = b"m" + marshal.dumps(value) if own else b"p" + pickle.dumps(value, 5)
    if len(packed) > protocol.payload_nbytes:
        raise ValueError(f"a number of {len(packed)} bytes is too long for {operation.name}")
    protocol.begin(operation, label, context.call_site.line())
    protocol.put(packed)
    if not protocol.arrive_and_wait():
        protocol.compare()
    found = [bytes(protocol.get(i)) for i in range(len(protocol.ranks))]
    values = [marshal.loads(x[1:]) if x[:1] == b"m" else pickle.loads(x[1:]) for x in found]
    protocol.release()
    context.operations += 1
    return values


@functools.lru_cache(maxsize=4096)
def number_label(operation: str, kind: str, operator: str, rank: int | None = None) -> Fingerprint:
    """Return the fingerprint of a reduction of numbers of one type, perhaps to one rank."""
    return fingerprint(operation, kind, root=rank, operator=operator, content="number")


@functools.lru_cache(maxsize=4096)
def array_label(
    operation: str, operator: str, dtype: Any, shape: Any, rank: int | None = None
) -> Fingerprint:
    """Return the fingerprint of a reduction of arrays, perhaps to one rank."""
    content = (str(dtype), shape)
    return fingerprint(
        operation, shown_dtype(dtype), str(shape), root=rank, operator=operator, content=content
    )


SHARED_INLINE = 64 << 10
"""Bytes up to which even shared arrays of up to four ranks go through the slots: one synchronisation instead
of two.  All that a slot holds: ``python -m benchmarks.operations.tuning`` finds a third of the time at 48
KiB still, and half of it with four ranks."""
MAX_PLANS = 1024


class ReductionSignature:
    """What is the same in every call of one operation, operator, dtype and shape."""

    __slots__ = (
        "fingerprint", "fused", "inline", "may_differ", "nbytes", "operation", "operator",
        "special", "ufunc", "views",
    )  # fmt: skip

    def __init__(
        self,
        operation: Operation,
        operator: Operator,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        inline_nbytes: int,
    ) -> None:
        self.operator, self.ufunc = operator, operator.ufunc
        self.fingerprint: Fingerprint = array_label(operation.name, operator.name, dtype, shape)
        self.nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
        self.operation = operation
        self.may_differ = False
        """Whether ranks that bring different content get no error: see `Averaging`."""
        self.inline = self.nbytes <= inline_nbytes
        self.fused = dtype.kind in operator.inexact_kinds
        """Whether the result is computed in an array of its own: in one layout on all ranks."""
        self.special = self.fused or operator.finish is not None
        self.views: list[list[AnyArray] | None] = [None] * GENERATIONS


@dataclass(frozen=True, slots=True, eq=False)
class Averaging:
    """The operator of `average_gradients`: an average of arrays whose forms ranks compare their own way.

    Equal to itself alone, which makes it a quick key.
    """

    label: Callable[[AnyArray], Fingerprint | None]
    """Returns what stands for all that a rank passed, of which an array is one; None: there is no average."""
    may_differ: bool
    """Whether this reduction is the one by which ranks compare what they passed."""


class AllReduce:
    """One rank's side of `all_reduce` in a group; `scan` and `maxloc` extend it by other ways to combine.

    Parameters
    ----------
    in_place : InPlaceReading, optional
        None: no member reads others' private arrays.
    operation : Operation
        What users call.
    """

    def __init__(
        self,
        context: RankContext,
        protocol: SlotProtocol,
        buffer: KeptBuffer,
        in_place: InPlaceReading | None,
        operation: Operation = Operation.all_reduce,
    ) -> None:
        self._operation, self._in_place = operation, in_place
        self._context, self._memory = context, context.memory
        self._protocol, self._buffer = protocol, buffer
        self._index, self._size = protocol.index, len(protocol.ranks)
        # Every rank reads all slots: with more ranks that is soon more than a synchronisation costs.
        self.inline_nbytes = min(protocol.payload_nbytes, SHARED_INLINE * 16 // max(4, self._size) ** 2)
        self._plans: dict[object, ReductionSignature] = {}

    def run(self, x: Any, op: str | Averaging, deadline_ns: int | None, line: int = 0) -> Any:
        """Combine `x` of all ranks; an array in place, which is returned.

        With `Averaging` only plain and writable arrays.  It returns None if there is no average, and nothing
        was begun; and False, on all ranks, if they passed different arrays, and nothing was written.

        Parameters
        ----------
        line : int
            The line that calls it, if that is known: looking for it takes a twentieth of a small operation.
        """
        if type(x) is not np.ndarray:
            return self._all_reduce_other(x, op, deadline_ns)
        try:
            plan = self._plans.get((op, x.dtype, x.shape))
        except TypeError:
            plan = None  # a list, say, cannot be looked up; what an operator is will be said below
        if plan is None and (plan := self._plan(op, x)) is None:
            return None
        if not x.flags.writeable:
            raise ReadOnlyArrayError(IN_PLACE.format(self._operation.name))
        context, protocol = self._context, self._protocol
        if self._size == 1:
            return x
        span = None if x.base is None else self._memory.span_of(x)
        protocol.deadline_ns = deadline_ns
        context.operations += 1
        context.nbytes += plan.nbytes
        if not plan.inline:
            context.private_nbytes += plan.nbytes if span is None else 0
            same = self._all_reduce_large(x, plan, span)
            protocol.release()
            return x if same else False
        generation = protocol.next_generation()
        views = plan.views[generation] or self._views(plan, generation, x)
        same = protocol.exchange_inline(
            plan.operation, plan.fingerprint, line or context.call_site.line(), x, span, views
        )
        if not same:
            if not plan.may_differ:
                protocol.compare()
            elif not protocol.agree():
                protocol.release()
                return False
        if not same or (span is not None and not protocol.spans.disjoint(protocol.generation)):
            protocol.check_overlap(protocol.bits())
        self.combine_slots(plan, views, x)
        protocol.release()
        return x

    def line(self) -> int:
        """Return the line of the cell that calls the operation."""
        return self._context.call_site.line()

    def _remember(self, key: object, plan: ReductionSignature) -> None:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan

    def _plan(self, op: str | Averaging, x: AnyArray) -> ReductionSignature | None:
        operation, name, label = self._operation, op, None
        if isinstance(op, Averaging):
            operation, name, label = Operation.average_gradients, "avg", op.label(x)
            if label is None:
                return None
        operator = operator_for(find_operator(name), x.dtype)
        plan = ReductionSignature(operation, operator, x.dtype, x.shape, self.inline_nbytes)
        if isinstance(op, Averaging) and label is not None:
            plan.fingerprint, plan.may_differ = label, op.may_differ
        self._remember((op, x.dtype, x.shape), plan)
        return plan

    def _views(self, plan: ReductionSignature, generation: int, x: AnyArray) -> list[AnyArray]:
        """Return every rank's slot as an array of the shape and dtype of `x`."""
        views: list[AnyArray] = [
            np.ndarray(x.shape, x.dtype, self._protocol.area.buffer, start)
            for start in self._protocol.payload_starts(generation)
        ]
        plan.views[generation] = views
        return views

    def combine_slots(self, plan: ReductionSignature, views: list[AnyArray], x: AnyArray) -> None:
        """Combine what lies on the slots into `x`."""
        try:
            if self._size > 2 or plan.special:
                self._combine_many(plan, views, x)
            else:
                plan.ufunc(views[0], views[1], out=x)
        except (FloatingPointError, RuntimeWarning):
            # The user's `numpy.seterr` or warning filter raised.  This rank must finish, or its peers would
            # have the result and it would not; the slots still hold what every rank wrote.
            with np.errstate(all="ignore"):
                self._combine_many(plan, views, x)

    def _combine_many(self, plan: ReductionSignature, views: list[AnyArray], x: AnyArray) -> None:
        out = np.empty(x.shape, x.dtype) if plan.fused else x
        combine(plan.operator, views, out)
        if out is not x:
            x[...] = out

    def _all_reduce_large(self, x: AnyArray, plan: ReductionSignature, span: SharedSpan | None) -> bool:
        """Combine an array that is not small; returns False if ranks differ in what may differ."""
        context, protocol = self._context, self._protocol
        protocol.begin(plan.operation, plan.fingerprint, context.call_site.line())
        fits, direct = plan.nbytes <= protocol.payload_nbytes, span is not None and span.direct
        source: AnyArray = x if fits or x.flags.c_contiguous else np.ascontiguousarray(x)

        def leave() -> None:
            if fits:
                # fault: half_payload
                self._slots(plan, x)[self._index][...] = x
            else:
                protocol.put(self._buffer.offer(source.reshape(-1)))

        place = b"" if fits or direct or self._in_place is None else self._in_place.offer(source)
        if span is not None and direct:
            protocol.put(self._memory.packed(x, span))
        elif place:
            protocol.put(place)
        else:
            leave()
        bits = (SHARED if span is not None else 0) | (DIRECT if direct else READABLE if place else 0)
        with context.exposing():
            if not protocol.arrive_and_wait(bits, span):
                if not plan.may_differ:
                    protocol.compare()
                elif not protocol.agree():
                    return False
            offers = protocol.bits()
            if any(offers):
                protocol.check_overlap(offers)
            route = choose_route(offers, fits=fits)
            if route is Route.DIRECT:
                self._combine_directly(plan, attached_arrays(context, protocol, x))
                return True
            if route is Route.IN_PLACE and self._in_place is not None and self._in_place.agreed():
                self._in_place.all_reduce(source.reshape(-1), plan.operator)
            else:
                if route is Route.IN_PLACE or offers_differ(offers):
                    if direct or place:
                        leave()  # the slot holds where the array lies, which is of no use
                    protocol.synchronize()
                if route is Route.INLINE:
                    self.combine_slots(plan, self._slots(plan, x), x)
                    return True
                self._combine_copies(plan, source.reshape(-1))
        if source is not x:
            x[...] = source
        return True

    def _combine_directly(self, plan: ReductionSignature, arrays: list[AnyArray]) -> None:
        direct_all_reduce(self._context, self._protocol, arrays, plan.operator)

    def _combine_copies(self, plan: ReductionSignature, flat: AnyArray) -> None:
        for piece, arrays in self._buffer.pieces(self._protocol, flat):
            self._combine_directly(plan, arrays)
            flat[piece] = arrays[self._index]

    def _slots(self, plan: ReductionSignature, x: AnyArray) -> list[AnyArray]:
        """Return every rank's slot of the collective that has begun, in the form of `x`."""
        generation = self._protocol.generation
        return plan.views[generation] or self._views(plan, generation, x)

    def _all_reduce_other(self, x: Any, op: Any, deadline_ns: int | None) -> Any:
        operator = find_operator(op)
        array = as_operand(x)
        if array is not None:
            if not array.flags.writeable:
                raise read_only(x, IN_PLACE.format(self._operation.name))
            self.run(array, op, deadline_ns)
            return x
        value = check_number(operator, x, self._operation.name)
        return self._all_reduce_number(value, type(value).__name__, operator, deadline_ns)

    def _all_reduce_number(self, value: Any, kind: str, operator: Operator, deadline_ns: int | None) -> Any:
        """Combine numbers, or what else the operator combines, in the order of ranks."""
        if self._size == 1:
            return self._combine_numbers(operator, [value])
        self._protocol.deadline_ns = deadline_ns
        label = number_label(self._operation.name, kind, operator.name)
        values = exchange_numbers(self._context, self._protocol, self._operation, label, value)
        return self._combine_numbers(operator, values)

    def _combine_numbers(self, operator: Operator, values: Sequence[Any]) -> Any:
        return combine_numbers(operator, values)

    def close(self) -> None:
        """Drop the cached views of the slots."""
        self._plans.clear()
