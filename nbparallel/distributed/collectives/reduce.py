"""reduce and reduce_scatter: the combination of all members' values, for one member, or a part for each.

Small arrays go through the slots, as in `all_reduce`.  Large arrays go directly if every member's lies in
shared memory: in `reduce_scatter` each member combines its part of all arrays where they lie; in `reduce`
each member combines one slice, and writes it into the root's array.  Of large private arrays the members of
`reduce_scatter` read their part where it lies (`in_place`).  All other arrays are copied piece by piece into
shared memory, and combined there directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.all_reduce import (
    array_label,
    check_number,
    combine_numbers,
    exchange_numbers,
    number_label,
)
from nbparallel.distributed.collectives.direct import (
    KeptBuffer,
    attached_arrays,
    direct_reduce,
    direct_reduce_scatter,
)
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.operators import Operator, combine, find_operator, operator_for, shown_dtype
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, SharedSpan, as_operand, in_kind_of
from nbparallel.distributed.slots.fingerprint import (
    DIRECT,
    READABLE,
    SHARED,
    Fingerprint,
    Route,
    choose_route,
    offers_differ,
)
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.wire.control import Operation


@dataclass(slots=True)
class Reduction:
    """One call of a reduction, as one member makes it."""

    operation: Operation
    operator: Operator
    label: Fingerprint
    source: AnyArray
    """Flat and contiguous."""
    span: SharedSpan | None
    """Where the user's array lies, if it is shared."""
    direct: bool
    """Whether `source` is that very memory, so that others can read it there."""
    target: AnyArray | None
    """Flat and contiguous; takes the result, or this member's part of it."""
    target_span: SharedSpan | None
    """Where it lies, if others could pass the same memory."""
    start: int = 0
    """The first element of the result that `target` takes."""
    root: int | None = None
    parts: Sequence[tuple[int, int]] | None = None
    """First element and the one behind the last that each member takes, if not all take all."""


class Reduce:
    """One rank's side of `reduce` and `reduce_scatter` in a group."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, buffer: KeptBuffer, in_place: InPlaceReading
    ) -> None:
        self._context, self._protocol, self._buffer = context, protocol, buffer
        self._in_place = in_place
        self._index, self._size = protocol.index, len(protocol.ranks)

    # -- reduce ------------------------------------------------------------------------------------------

    def reduce(self, x: Any, root: int, op: str, deadline_ns: int | None) -> Any:
        """Return the combination on `root`, where a writable array is filled; None elsewhere."""
        operator = find_operator(op)
        self._protocol.deadline_ns = deadline_ns
        array = x if type(x) is np.ndarray else as_operand(x)
        if array is None:
            return self._reduce_number(x, root, operator)
        operator = operator_for(operator, array.dtype)
        mine = self._index == root
        if self._size == 1:
            return x if array.flags.writeable else in_kind_of(x, array.copy())
        span = self._context.memory.span_of(array)
        source = (array if array.flags.c_contiguous else np.ascontiguousarray(array)).reshape(-1)
        fills = mine and array.flags.writeable
        in_place = fills and array.flags.c_contiguous
        direct = span is not None and span.direct and (in_place or not mine)
        target = None if not mine else source if in_place else np.empty(array.size, array.dtype)
        rank = self._protocol.ranks[root]
        label = array_label("reduce", operator.name, array.dtype, array.shape, rank)
        self._run(
            Reduction(
                Operation.reduce, operator, label, source, span, direct, target, span if fills else None,
                root=root,
            )
        )  # fmt: skip
        if not mine or target is None:
            return None
        if fills and not in_place:
            array[...] = target.reshape(array.shape)
        return x if fills else in_kind_of(x, target.reshape(array.shape))

    def _reduce_number(self, x: Any, root: int, operator: Operator) -> Any:
        value = check_number(operator, x, "reduce")
        if self._size == 1:
            return combine_numbers(operator, [value])
        label = number_label("reduce", type(value).__name__, operator.name, self._protocol.ranks[root])
        values = exchange_numbers(self._context, self._protocol, Operation.reduce, label, value)
        return combine_numbers(operator, values) if self._index == root else None

    # -- reduce_scatter ------------------------------------------------------------------------------------

    def reduce_scatter(
        self, parts: Sequence[Any], whole: AnyArray | None, op: str, output: AnyArray | None,
        deadline_ns: int | None,
    ) -> Any:  # fmt: skip
        """Return this member's part of the combination.

        Parameters
        ----------
        parts : sequence
            One array or number for each member.
        whole : array, optional
            What they are the parts of, along axis 0.
        output : array, optional
            Filled with this member's part, and returned.
        """
        operator = find_operator(op)
        self._protocol.deadline_ns = deadline_ns
        if whole is None and all(as_operand(part) is None for part in parts):
            number = self._reduce_scatter_numbers(parts, operator)
            if output is None:
                return number
            output[...] = number
            return output
        arrays: list[AnyArray] = []
        for part in parts:
            arrays.append(array_part(part, arrays))
        mine = arrays[self._index]
        if output is not None and (output.dtype, output.shape) != (mine.dtype, mine.shape):
            raise ValueError(
                f"the output of reduce_scatter has dtype {shown_dtype(output.dtype)} and shape "
                f"{output.shape}, and this rank's part is {shown_dtype(mine.dtype)} {mine.shape}"
            )
        operator = operator_for(operator, mine.dtype)
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
        mine, memory = arrays[self._index], self._context.memory
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
                Operation.reduce_scatter, operator, label, source, span, direct, target.reshape(-1), written,
                start=bounds[self._index][0], parts=bounds,
            )
        )  # fmt: skip
        return target

    def _reduce_scatter_numbers(self, parts: Sequence[Any], operator: Operator) -> Any:
        values = [check_number(operator, part, "reduce_scatter") for part in parts]
        if self._size == 1:
            return combine_numbers(operator, values)
        label = number_label("reduce_scatter", "numbers", operator.name)
        lists = exchange_numbers(self._context, self._protocol, Operation.reduce_scatter, label, values)
        return combine_numbers(operator, [numbers[self._index] for numbers in lists])

    # -- both ------------------------------------------------------------------------------------------------

    def _run(self, reduction: Reduction) -> None:
        """Arrive, compare, combine."""
        context, protocol, source = self._context, self._protocol, reduction.source
        protocol.begin(reduction.operation, reduction.label, context.call_site.line())
        context.operations += 1
        context.nbytes += source.nbytes
        context.private_nbytes += source.nbytes if reduction.span is None else 0
        protocol.spans.declare_write(protocol.generation, reduction.target_span)
        shared = SHARED if reduction.span is not None else 0
        if source.nbytes <= protocol.payload_nbytes:
            # fault: half_payload
            self._slot(self._index, source)[...] = source
            self._arrive_and_compare(reduction, shared)
            self._combine_slots(reduction)
        else:
            with context.exposing():
                self._run_large(reduction, shared)
        protocol.release()

    def _run_large(self, reduction: Reduction, shared: int) -> None:
        protocol, source, offer = self._protocol, reduction.source, self._buffer.offer
        place = b""
        if reduction.direct:
            protocol.put(self._context.memory.packed_flat(source))
        else:
            place = b"" if reduction.parts is None else self._in_place.offer(source)
            protocol.put(place or offer(source, reduction.parts))
        way = DIRECT if reduction.direct else READABLE if place else 0
        offers = self._arrive_and_compare(reduction, shared | way)
        route = choose_route(offers, fits=False)
        if route is Route.DIRECT:
            self._combine_directly(reduction)
        elif route is Route.IN_PLACE and self._in_place.agreed():
            self._in_place.reduce_scatter(source, reduction.operator, reduction.start, reduction.target)
        else:
            if route is Route.IN_PLACE or offers_differ(offers):
                if way:
                    protocol.put(offer(source, reduction.parts))  # in place of where the array lies
                protocol.synchronize()
            self._combine_copies(reduction)

    def _arrive_and_compare(self, reduction: Reduction, bits: int) -> list[int]:
        """Return what all members offer; raises on all if they differ, or would write others' memory."""
        protocol = self._protocol
        same = protocol.arrive_and_wait(bits, reduction.span)
        if not same:
            protocol.compare()
        offers = protocol.bits() if bits or not same else [0] * self._size
        if any(offers) or reduction.parts is not None:  # else every member brought a private array to combine
            protocol.check_writes(offers)
        return offers

    def _slot(self, index: int, like: AnyArray) -> AnyArray:
        return np.ndarray(
            like.shape, like.dtype, self._protocol.area.buffer, self._protocol.payload_start(index)
        )

    def _combine_slots(self, reduction: Reduction) -> None:
        target = reduction.target
        if target is None:
            return
        start, stop = reduction.start, reduction.start + target.size
        views = [self._slot(i, reduction.source)[start:stop] for i in range(self._size)]
        with np.errstate(all="ignore"):
            combine(reduction.operator, views, target)

    def _combine_copies(self, reduction: Reduction) -> None:
        context, protocol, target = self._context, self._protocol, reduction.target
        root, operator = reduction.root, reduction.operator
        for piece, arrays in self._buffer.pieces(protocol, reduction.source, reduction.parts):
            if root is not None:
                direct_reduce(context, protocol, arrays, arrays[root], operator)
                if target is not None:
                    target[piece] = arrays[root]
            elif target is not None:
                part = target[piece.start - reduction.start : piece.stop - reduction.start]
                direct_reduce_scatter(context, protocol, arrays, part, 0, operator)
                protocol.synchronize()

    def _combine_directly(self, reduction: Reduction) -> None:
        context, protocol, operator, root = self._context, self._protocol, reduction.operator, reduction.root
        arrays = attached_arrays(context, protocol, reduction.source, writable=root)
        if root is not None:
            direct_reduce(context, protocol, arrays, arrays[root], operator)
        elif reduction.target is not None:
            direct_reduce_scatter(context, protocol, arrays, reduction.target, reduction.start, operator)
            protocol.announce_done()
            protocol.wait_until_read()


def array_part(x: Any, before: Sequence[AnyArray]) -> AnyArray:
    """Return a part as a plain array; raises if it is none, or of another dtype than those `before`."""
    array = as_operand(x)
    if array is None:
        raise TypeError(
            f"reduce_scatter needs arrays or numbers, and part {len(before)} is {type(x).__name__}"
        )
    if before and array.dtype != before[0].dtype:
        raise TypeError(
            f"the parts of reduce_scatter must have one dtype, not {shown_dtype(before[0].dtype)} and "
            f"{shown_dtype(array.dtype)}"
        )
    return array
