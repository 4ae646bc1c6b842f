"""reduce and reduce_scatter: the combination of all members' values, for one member, or a part for each.

Small arrays go through the slots, as in `all_reduce`.  Large arrays go directly if every member's lies in
shared memory: in `reduce_scatter` each member combines its part of all arrays where they lie; in `reduce`
each member combines one slice, and writes it into the result.  Of large private arrays members read what they
combine where it lies (`in_place`), and the root of `reduce` reads their parts of the result likewise.  All
other arrays go through the staging buffers, a chunk at a time.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.all_reduce import check_number, combine_numbers, exchange_numbers
from nbparallel.distributed.collectives.direct import direct_reduce, direct_reduce_scatter
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.collectives.staging import StagingBuffers, StagingLayout
from nbparallel.distributed.operators import Operator, combine, find_operator, operator_for, shown_dtype
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    SharedSpan,
    as_operand,
    decode_handle,
    in_kind_of,
)
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
from nbparallel.wire.control import Operation

MAX_FINGERPRINTS = 1024


@dataclass(slots=True)  # to freeze it takes four times as long
class ScatterLayout:
    """The memory of one `reduce_scatter`: where its parts lie, and where its result goes."""

    source: AnyArray
    """All parts, flat and contiguous."""
    in_whole: bool
    """Whether that is the user's own array."""
    bounds: Sequence[tuple[int, int]]
    """First element of each part and the one behind its last."""
    target: AnyArray
    """Takes this member's part of the result; flat and contiguous."""
    in_place: bool
    """Whether that is the user's output."""


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
        self, context: RankContext, protocol: SlotProtocol, staging: StagingBuffers, in_place: InPlaceReading
    ) -> None:
        self._context, self._protocol, self._staging = context, protocol, staging
        self._in_place = in_place
        self._index, self._size = protocol.index, len(protocol.ranks)
        self._fingerprints: dict[Any, Fingerprint] = {}

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
        target = source if in_place else self._result(array, span) if mine else None
        self._run(
            Reduction(
                Operation.reduce, operator,
                self._fingerprint("reduce", operator, array.dtype, array.shape, root),
                source, span, span is not None and span.direct, target, span if fills else None, root=root,
            )
        )  # fmt: skip
        if not mine or target is None:
            return None
        if fills and not in_place:
            array[...] = target.reshape(array.shape)
        return x if fills else in_kind_of(x, target.reshape(array.shape))

    def _result(self, array: AnyArray, span: SharedSpan | None) -> AnyArray:
        """Return memory for a result that does not go into the user's array."""
        if span is None or array.nbytes <= self._protocol.payload_nbytes:
            return np.empty(array.size, array.dtype)
        return self._context.store.empty((array.size,), array.dtype)

    def _reduce_number(self, x: Any, root: int, operator: Operator) -> Any:
        value = check_number(operator, x, "reduce")
        if self._size == 1:
            return combine_numbers(operator, [value])
        label = self._fingerprint("reduce", operator, type(value).__name__, "number", root)
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
        arrays = self._validate(parts, output)
        mine = arrays[self._index]
        operator = operator_for(operator, mine.dtype)
        if self._size == 1:
            if output is None:
                return mine.copy()
            output[...] = mine
            return output
        layout = self._layout(arrays, whole, output)
        memory = self._context.memory
        span = None if whole is None else memory.span_of(whole)
        shape: Any = tuple(a.shape for a in arrays) if whole is None else whole.shape
        self._run(
            Reduction(
                Operation.reduce_scatter, operator,
                self._fingerprint("reduce_scatter", operator, mine.dtype, shape, None),
                layout.source, span, span is not None and layout.in_whole, layout.target,
                None if output is None else memory.span_of(output),
                start=layout.bounds[self._index][0], parts=layout.bounds,
            )
        )  # fmt: skip
        result = layout.target.reshape(mine.shape)
        if output is None:
            return result
        if not layout.in_place:
            output[...] = result
        return output

    def _validate(self, parts: Sequence[Any], output: AnyArray | None) -> list[AnyArray]:
        """Return the parts as plain arrays; raises if they or the output are of the wrong form."""
        arrays: list[AnyArray] = []
        for part in parts:
            arrays.append(array_part(part, arrays))
        mine = arrays[self._index]
        if output is not None and (output.dtype, output.shape) != (mine.dtype, mine.shape):
            raise ValueError(
                f"the output of reduce_scatter has dtype {shown_dtype(output.dtype)} and shape "
                f"{output.shape}, and this rank's part is {shown_dtype(mine.dtype)} {mine.shape}"
            )
        return arrays

    def _layout(
        self, arrays: Sequence[AnyArray], whole: AnyArray | None, output: AnyArray | None
    ) -> ScatterLayout:
        """Return where the parts of a call lie, and where its result goes."""
        mine = arrays[self._index]
        in_whole = whole is not None and whole.flags.c_contiguous
        if whole is not None and in_whole:
            source = whole.reshape(-1)
        else:
            source = np.concatenate([a.reshape(-1) for a in arrays], dtype=mine.dtype)  # else in native order
        in_place = output is not None and output.flags.c_contiguous
        if output is not None and any(np.may_share_memory(output, array) for array in arrays):
            in_place = False  # others may still read what would be written
        target = output.reshape(-1) if output is not None and in_place else np.empty(mine.size, mine.dtype)
        ends = list(accumulate(a.size for a in arrays))
        return ScatterLayout(source, in_whole, list(zip([0, *ends], ends, strict=False)), target, in_place)

    def _reduce_scatter_numbers(self, parts: Sequence[Any], operator: Operator) -> Any:
        values = [check_number(operator, part, "reduce_scatter") for part in parts]
        if self._size == 1:
            return combine_numbers(operator, values)
        label = self._fingerprint("reduce_scatter", operator, "numbers", "number", None)
        lists = exchange_numbers(self._context, self._protocol, Operation.reduce_scatter, label, values)
        return combine_numbers(operator, [numbers[self._index] for numbers in lists])

    # -- both ------------------------------------------------------------------------------------------------

    def _run(self, reduction: Reduction) -> None:
        """Arrive, compare, combine."""
        context, protocol, source = self._context, self._protocol, reduction.source
        protocol.begin(reduction.operation, reduction.label, context.call_site.line())
        context.operations += 1
        context.nbytes += source.nbytes
        protocol.spans.declare_write(protocol.generation, reduction.target_span)
        fits = source.nbytes <= protocol.payload_nbytes
        direct = reduction.direct and not fits
        layout = StagingLayout(source.size, source.itemsize, self._size, reduction.parts)

        def leave() -> None:
            if fits:
                if fault_injection.ARMED:
                    fault_injection.hit("half_payload", context.rank)
                self._slot(self._index, source)[...] = source
            else:
                protocol.put(self._staging.offer(source, layout))

        place = b"" if fits or direct else self._in_place.offer(source, reduction.root)
        if direct:
            protocol.put(self._addresses(reduction))
        elif place:
            protocol.put(place)
        else:
            leave()
        bits = SHARED if reduction.span is not None else 0
        bits |= DIRECT if direct else READABLE if place else 0
        mixed = False
        if bits:
            with context.exposing(direct and reduction.root is not None and reduction.target is not None):
                route, mixed = self._agree(fits=fits, same=protocol.arrive_and_wait(bits, reduction.span))
                if route is Route.DIRECT:
                    self._combine_directly(reduction)
        elif protocol.arrive_and_wait():  # every member brought a private array: only outputs could overlap
            if reduction.parts is not None:
                protocol.check_writes([0] * self._size)
            route = Route.INLINE if fits else Route.STAGED
        else:
            route, mixed = self._agree(fits=fits, same=False)
        if route is Route.IN_PLACE and self._in_place.agreed():
            self._combine_in_place(reduction)
        elif route is not Route.DIRECT:
            if mixed or route is Route.IN_PLACE:
                if direct or place:
                    leave()  # the slot holds addresses, which the route that is taken does not use
                protocol.synchronize()
            if route is Route.INLINE:
                self._combine_slots(reduction)
            else:
                self._staging.reduce(source, reduction.operator, layout, reduction.target, reduction.start)
        protocol.release()

    def _agree(self, *, fits: bool, same: bool) -> tuple[Route, bool]:
        """Return the route that all members take, and whether they offered different ones; raises alike."""
        protocol = self._protocol
        if not same:
            protocol.compare()
        offers = protocol.bits()
        protocol.check_writes(offers)
        return choose_route(offers, fits=fits), offers_differ(offers)

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

    def _addresses(self, reduction: Reduction) -> bytes:
        """Return where this member's array lies, and where the root wants the result."""
        memory, target = self._context.memory, reduction.target
        assert reduction.span is not None, "only shared memory is worked on directly"
        packed = memory.packed_flat(reduction.source)
        if reduction.root is None or target is None:
            return marshal.dumps((packed, b""))
        return marshal.dumps((packed, memory.packed_flat(target)))

    def _combine_in_place(self, reduction: Reduction) -> None:
        if reduction.parts is None:
            self._in_place.reduce(reduction.source, reduction.operator, reduction.target)
            return
        assert reduction.target is not None, "every member takes a part"
        part = reduction.parts[self._index]
        self._in_place.reduce_scatter(reduction.source, reduction.operator, part, reduction.target)

    def _combine_directly(self, reduction: Reduction) -> None:
        context, protocol = self._context, self._protocol
        addresses = [marshal.loads(bytes(protocol.get(i))) for i in range(self._size)]
        arrays = [
            reduction.source if i == self._index else context.memory.attach(packed, writable=False)
            for i, (packed, _) in enumerate(addresses)
        ]
        if reduction.root is None:
            assert reduction.target is not None, "every member takes a part"
            direct_reduce_scatter(
                context, protocol, arrays, reduction.target, reduction.start, reduction.operator
            )  # fmt: skip
            protocol.announce_done()
            protocol.wait_until_read()
            return
        target = reduction.target
        if target is None:
            packed, wanted = addresses[reduction.root]
            target = (
                context.memory.attach(wanted, writable=True)
                if wanted == packed
                else context.attach(decode_handle(wanted), writable=True)  # of this call only
            )
        direct_reduce(context, protocol, arrays, target, reduction.operator)

    def _fingerprint(
        self, operation: str, operator: Operator, dtype: Any, shape: Any, root: int | None
    ) -> Fingerprint:
        key = (operation, operator.name, dtype, shape, root)
        found = self._fingerprints.get(key)
        if found is None:
            if len(self._fingerprints) >= MAX_FINGERPRINTS:
                self._fingerprints.clear()
            content = ("number" if shape == "number" else str(dtype), shape)
            rank = None if root is None else self._protocol.ranks[root]
            found = self._fingerprints[key] = fingerprint(
                operation, shown_dtype(dtype),
                "-" if shape == "number" else str(shape), root=rank,
                operator=operator.name, content=content,
            )  # fmt: skip
        return found


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
