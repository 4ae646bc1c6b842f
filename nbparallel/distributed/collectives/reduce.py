"""all_reduce, reduce and reduce_scatter: all members' values, combined for all, for one, or in parts.

Small arrays and numbers go through the slots: one synchronization, and every member combines all slots
itself.  Large arrays go directly if every member's lies in shared memory: each member combines one slice of
all arrays where they lie, in `reduce_scatter` its part, and writes it where it belongs.  Large private arrays
are read where they lie (`in_place`), but in `reduce`.  All other arrays are copied piece by piece into shared
memory, and combined there directly.  All members read the same bits in all slots, so they choose the same
route.
"""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.direct import (
    KeptBuffer,
    attached_arrays,
    direct_reduce,
    direct_reduce_scatter,
)
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.collectives.movements import (
    array_label,
    check_number,
    combine_numbers,
    number_label,
)
from nbparallel.distributed.operators import Operator, combine, find_operator, operator_for
from nbparallel.distributed.runtime.rank_context import Exposure, RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    Cache,
    SharedSpan,
    as_operand,
    in_kind_of,
    read_only,
)
from nbparallel.distributed.slots.slot_area import (
    DIRECT,
    READABLE,
    SHARED,
    Fingerprint,
    all_offer,
    offers_differ,
)
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.errors import IN_PLACE, ReadOnlyArrayError
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER, Operation

SHARED_INLINE = 64 << 10
"""Bytes up to which even shared arrays of up to four ranks go through the slots: one synchronisation instead
of two.  All that a slot holds: ``python -m benchmarks.operations.tuning`` finds a third of the time at 48
KiB still, and half of it with four ranks."""


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
        label: Fingerprint,
        x: AnyArray,
        inline_nbytes: int,
        may_differ: bool,
    ) -> None:
        self.operation, self.operator, self.ufunc = operation, operator, operator.ufunc
        self.fingerprint, self.nbytes = label, x.nbytes
        self.may_differ = may_differ
        """Whether ranks that bring different content get no error: see `Averaging`."""
        self.inline = self.nbytes <= inline_nbytes
        self.fused = x.dtype.kind in operator.inexact_kinds
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


@dataclass(slots=True)
class Reduction:
    """One call of a reduction of arrays, as one member makes it."""

    operation: Operation
    operator: Operator
    label: Fingerprint
    array: AnyArray
    """What the user passed."""
    span: SharedSpan | None
    """Where it lies, if it is shared."""
    source: AnyArray
    """The same, flat and contiguous."""
    direct: bool
    """Whether `source` is that very memory, and so large that others read it there."""
    target: AnyArray | None
    """Flat and contiguous; takes the result, or this member's part of it."""
    target_span: SharedSpan | None
    """Where it lies, if others could pass the same memory."""
    start: int = 0
    """The first element of the result that `target` takes."""
    root: int | None = None
    parts: Sequence[tuple[int, int]] | None = None
    """First element and the one behind the last that each member takes, if not all take all."""
    may_differ: bool = False
    """Whether members that bring different content get no error: see `Averaging`."""
    behind: int | None = None
    """The member behind the last one whose array is combined, if not all are."""


class Reduce:
    """One rank's side of reductions in a group."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, buffer: KeptBuffer, in_place: InPlaceReading
    ) -> None:
        self._context, self._memory, self._in_place = context, context.memory, in_place
        self._protocol, self._buffer = protocol, buffer
        self._index, self._size = protocol.index, len(protocol.ranks)
        # Every rank reads all slots: with more ranks that is soon more than a synchronisation costs.
        self._inline_nbytes = min(protocol.payload_nbytes, SHARED_INLINE * 16 // max(4, self._size) ** 2)
        self._plans: Cache[object, ReductionSignature] = Cache()

    # -- all_reduce ----------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: str | Averaging, deadline_ns: int | None, line: int = 0) -> Any:
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
            raise ReadOnlyArrayError(IN_PLACE.format("all_reduce"))
        context, protocol = self._context, self._protocol
        if self._size == 1:
            return x
        span = None if x.base is None else self._memory.span_of(x)
        protocol.deadline_ns = deadline_ns
        if not plan.inline:
            return self._all_reduce_large(x, plan, span)
        context.operations += 1
        context.nbytes += plan.nbytes
        generation = (protocol.number + 1) % GENERATIONS  # the slots that this one will use
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
        try:
            if self._size > 2 or plan.special:
                self._combine_slots(plan, views, x)
            else:
                plan.ufunc(views[0], views[1], out=x)
        except (FloatingPointError, RuntimeWarning):
            # The user's `numpy.seterr` or warning filter raised.  This rank must finish, or its peers would
            # have the result and it would not; the slots still hold what every rank wrote.
            with np.errstate(all="ignore"):
                self._combine_slots(plan, views, x)
        protocol.release()
        return x

    def line(self) -> int:
        """Return the line of the cell that calls the operation."""
        return self._context.call_site.line()

    def _plan(self, op: str | Averaging, x: AnyArray) -> ReductionSignature | None:
        if isinstance(op, Averaging):
            operation, name, label, may_differ = (
                Operation.average_gradients, "avg", op.label(x), op.may_differ
            )  # fmt: skip
            if label is None:
                return None
        else:
            operation, name, label, may_differ = Operation.all_reduce, op, None, False
        operator = operator_for(find_operator(name), x.dtype)
        label = label or array_label("all_reduce", operator.name, x.dtype, x.shape)
        plan = ReductionSignature(operation, operator, label, x, self._inline_nbytes, may_differ)
        self._plans[op, x.dtype, x.shape] = plan
        return plan

    def _views(self, plan: ReductionSignature, generation: int, x: AnyArray) -> list[AnyArray]:
        """Return every rank's slot as an array of the shape and dtype of `x`."""
        views: list[AnyArray] = [
            np.ndarray(x.shape, x.dtype, self._protocol.area.buffer, slots[generation] + SLOT_HEADER)
            for slots in self._protocol.area.slots
        ]
        plan.views[generation] = views
        return views

    def _combine_slots(self, plan: ReductionSignature, views: list[AnyArray], x: AnyArray) -> None:
        out = np.empty(x.shape, x.dtype) if plan.fused else x
        combine(plan.operator, views, out)
        if out is not x:
            x[...] = out

    def _all_reduce_large(self, x: AnyArray, plan: ReductionSignature, span: SharedSpan | None) -> Any:
        source = x if x.flags.c_contiguous else np.ascontiguousarray(x)
        flat = source.reshape(-1)
        same = self._run(
            Reduction(
                plan.operation, plan.operator, plan.fingerprint, x, span, flat,
                span is not None and span.direct, flat, span, may_differ=plan.may_differ,
            )
        )  # fmt: skip
        if same and source is not x:
            x[...] = source
        return x if same else False

    def _all_reduce_other(self, x: Any, op: Any, deadline_ns: int | None) -> Any:
        operator = find_operator(op)
        array = as_operand(x)
        if array is not None:
            if not array.flags.writeable:
                raise read_only(x, IN_PLACE.format("all_reduce"))
            self.all_reduce(array, op, deadline_ns)
            return x
        value = check_number(operator, x, "all_reduce")
        if self._size == 1:
            return combine_numbers(operator, [value])
        self._protocol.deadline_ns = deadline_ns
        label = number_label("all_reduce", type(value).__name__, operator.name)
        return combine_numbers(operator, self.exchange_numbers(Operation.all_reduce, label, value))

    def exchange_numbers(self, operation: Operation, label: Fingerprint, value: Any) -> list[Any]:
        """Return what all members bring, numbers or lists of them, the fastest way from all to all."""
        context, protocol = self._context, self._protocol
        # marshal for Python's own numbers, pickle for numpy's
        own = type(value) in (int, float, complex)
        packed = b"m" + marshal.dumps(value) if own else b"p" + pickle.dumps(value, 5)
        if len(packed) > protocol.payload_nbytes:
            raise ValueError(f"a number of {len(packed)} bytes is too long for {operation.name}")
        protocol.begin(operation, label, context.call_site.line())
        protocol.put(packed)
        if not protocol.arrive_and_wait():
            protocol.compare()
        found = [bytes(protocol.get(i)) for i in range(self._size)]
        values = [marshal.loads(x[1:]) if x[:1] == b"m" else pickle.loads(x[1:]) for x in found]
        protocol.release()
        context.operations += 1
        return values

    # -- reduce ------------------------------------------------------------------------------------------

    def reduce(self, x: Any, array: AnyArray, root: int, op: str, deadline_ns: int | None) -> Any:
        """Return the combination on `root`, where a writable array is filled; None elsewhere."""
        self._protocol.deadline_ns = deadline_ns
        operator = operator_for(find_operator(op), array.dtype)
        mine = self._index == root
        if self._size == 1:
            return x if array.flags.writeable else in_kind_of(x, array.copy())
        span = self._memory.span_of(array)
        source = (array if array.flags.c_contiguous else np.ascontiguousarray(array)).reshape(-1)
        fills = mine and array.flags.writeable
        in_place = fills and array.flags.c_contiguous
        direct = span is not None and span.direct and (in_place or not mine) and not self._fits(source)
        target = None if not mine else source if in_place else np.empty(array.size, array.dtype)
        label = array_label("reduce", operator.name, array.dtype, array.shape, self._protocol.ranks[root])
        self._run(
            Reduction(
                Operation.reduce, operator, label, array, span, source, direct, target,
                span if fills else None, root=root,
            )
        )  # fmt: skip
        if target is None:
            return None
        if fills and not in_place:
            array[...] = target.reshape(array.shape)
        return x if fills else in_kind_of(x, target.reshape(array.shape))

    def scan(self, operation: Operation, array: AnyArray, op: str, deadline_ns: int | None) -> bool:
        """Combine a short array in place with those of lower members; whether there are any, or its own."""
        self._protocol.deadline_ns = deadline_ns
        operator, span = operator_for(find_operator(op), array.dtype), self._memory.span_of(array)
        source = np.ascontiguousarray(array).reshape(-1)
        target = np.empty_like(source) if (behind := self._index + (operation is Operation.scan)) else None
        label = array_label(operation.name, operator.name, array.dtype, array.shape)
        self._run(
            Reduction(operation, operator, label, array, span, source, False, target, span, behind=behind)
        )
        if target is not None:
            array[...] = target.reshape(array.shape)
        return target is not None

    # -- reduce_scatter ------------------------------------------------------------------------------------

    def reduce_scatter(
        self, operator: Operator, arrays: Sequence[AnyArray], whole: AnyArray | None,
        output: AnyArray | None, deadline_ns: int | None,
    ) -> Any:  # fmt: skip
        """Return this member's part of the combination.

        Parameters
        ----------
        arrays : sequence of array
            One for each member.
        whole : array, optional
            What they are the parts of, along axis 0.
        output : array, optional
            Filled with this member's part, and returned.
        """
        self._protocol.deadline_ns = deadline_ns
        mine = arrays[self._index]
        result = mine.copy() if self._size == 1 else self._scatter(arrays, whole, operator, output)
        if output is None:
            return result
        if not np.may_share_memory(output, result):
            output[...] = result
        return output

    def _scatter(
        self,
        arrays: Sequence[AnyArray],
        whole: AnyArray | None,
        operator: Operator,
        output: AnyArray | None,
    ) -> AnyArray:
        """Return this member's part, which lies in the output unless others may read what is there."""
        mine, memory = arrays[self._index], self._memory
        span = None if whole is None else memory.span_of(whole)
        if whole is not None and whole.flags.c_contiguous:
            source, direct = whole.reshape(-1), span is not None
        else:
            source, direct = np.concatenate([a.reshape(-1) for a in arrays], dtype=mine.dtype), False
        target = np.empty(mine.shape, mine.dtype)
        written = None if output is None else memory.span_of(output)
        apart = output is not None and not any(np.may_share_memory(output, array) for array in arrays)
        if output is not None and apart and output.flags.c_contiguous:
            target = output
        ends = list(accumulate(a.size for a in arrays))
        bounds = list(zip([0, *ends], ends, strict=False))
        shape: Any = tuple(a.shape for a in arrays) if whole is None else whole.shape
        label = array_label("reduce_scatter", operator.name, mine.dtype, shape)
        self._run(
            Reduction(
                Operation.reduce_scatter, operator, label, source if whole is None else whole, span, source,
                direct and not self._fits(source), target.reshape(-1), written,
                start=bounds[self._index][0], parts=bounds,
            )
        )  # fmt: skip
        return target

    # -- all three -------------------------------------------------------------------------------------------

    def _fits(self, flat: AnyArray) -> bool:
        return bool(flat.nbytes <= self._protocol.payload_nbytes)

    def _run(self, reduction: Reduction) -> bool:
        """Arrive, compare, combine; returns False if members differ in what may differ."""
        context, protocol, nbytes = self._context, self._protocol, reduction.source.nbytes
        protocol.begin(reduction.operation, reduction.label, context.call_site.line())
        context.operations += 1
        context.nbytes += nbytes
        context.private_nbytes += nbytes if reduction.span is None else 0
        protocol.spans.declare_write(protocol.generation, reduction.target_span)
        with Exposure(context):
            same = self._meet(reduction)
        protocol.release()
        return same

    def _meet(self, reduction: Reduction) -> bool:
        protocol, source, span = self._protocol, reduction.source, reduction.span
        place, fits = b"", self._fits(source)
        if reduction.direct and span is not None:
            protocol.put(self._memory.packed(reduction.array, span))
        elif reduction.root is None and not fits and (place := self._in_place.offer(source)):
            protocol.put(place)
        else:
            self._leave(reduction)
        way = DIRECT if reduction.direct else READABLE if place else 0
        bits = way | (SHARED if span is not None else 0)
        same = protocol.arrive_and_wait(bits, span)
        if not same:
            if not reduction.may_differ:
                protocol.compare()
            elif not protocol.agree():
                return False
        offers = protocol.bits() if bits or not same else [0] * self._size
        if any(offers) or reduction.parts is not None:  # else every member brought a private array to combine
            protocol.check_writes(offers)
        readable = all_offer(offers, READABLE)
        if all_offer(offers, DIRECT):
            writable: Sequence[int | None] = (reduction.root,)
            if reduction.root is None and reduction.parts is None:
                writable = range(self._size)
            arrays = attached_arrays(self._context, protocol, source, writable)
            self._combine(reduction, arrays, reduction.target, reduction.start)
            if reduction.parts is not None:
                protocol.announce_done()
                protocol.wait_until_read()
        elif readable and self._in_place.agreed():
            if reduction.parts is None:
                self._in_place.all_reduce(source, reduction.operator)
            else:
                self._in_place.reduce_scatter(source, reduction.operator, reduction.start, reduction.target)
        else:
            if readable or offers_differ(offers):
                if way:
                    self._leave(reduction)  # in place of where the array lies
                protocol.synchronize()
            if fits:
                self._combine_left(reduction)
            else:
                self._combine_copies(reduction)
        return True

    def _leave(self, reduction: Reduction) -> None:
        """Leave a copy of the array, or of its first piece, for all members."""
        source = reduction.source
        if self._fits(source):
            # fault: half_payload
            self._slot(self._index, source)[...] = source
        else:
            self._protocol.put(self._buffer.offer(source, reduction.parts))

    def _slot(self, index: int, like: AnyArray) -> AnyArray:
        return np.ndarray(
            like.shape, like.dtype, self._protocol.area.buffer, self._protocol.payload_start(index)
        )

    def _combine_left(self, reduction: Reduction) -> None:
        if (target := reduction.target) is not None:
            start, stop = reduction.start, reduction.start + target.size
            members = range(self._size)[: reduction.behind]
            views = [self._slot(i, reduction.source)[start:stop] for i in members]
            if len(views) == 1:
                target[...] = views[0]
            with np.errstate(all="ignore"):
                combine(reduction.operator, views, target)

    def _combine_copies(self, reduction: Reduction) -> None:
        target, start = reduction.target, reduction.start
        taken = self._index if reduction.root is None else reduction.root
        for piece, arrays in self._buffer.pieces(self._protocol, reduction.source, reduction.parts):
            part = None if target is None else target[piece.start - start : piece.stop - start]
            self._combine(reduction, arrays, part, 0)
            if reduction.parts is not None:
                self._protocol.synchronize()
            elif part is not None:
                part[...] = arrays[taken]

    def _combine(
        self, reduction: Reduction, arrays: list[AnyArray], target: AnyArray | None, start: int
    ) -> None:
        """Combine arrays in shared memory directly; a part of them, from `start` on, into `target`."""
        context, protocol, operator = self._context, self._protocol, reduction.operator
        if reduction.parts is None:
            targets = arrays if reduction.root is None else [arrays[reduction.root]]
            direct_reduce(context, protocol, arrays, targets, operator)
        elif target is not None:
            direct_reduce_scatter(context, protocol, arrays, target, start, operator)

    def close(self) -> None:
        """Drop the cached views of the slots."""
        self._plans.clear()
