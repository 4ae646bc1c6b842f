"""Nonblocking collectives: what ``async_op=True`` starts, and how it makes progress.

A collective is *posted* when its record lies in a slot and its rank has arrived; it is *complete* when all
members have arrived, and this rank has read their records.  Neither step blocks.  A collective that finds no
free slot is posted later.  Another collective of the same group first completes all that are pending: every
member must reach those first, so this adds no wait that could not end.

Every nonblocking collective is one exchange of records: a reduction moves all values, and each member
combines them itself.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.all_reduce import (
    AllReduce,
    Averaging,
    ReductionSignature,
    array_label,
    check_number,
    combine_numbers,
)
from nbparallel.distributed.collectives.broadcast import READ_ONLY
from nbparallel.distributed.collectives.direct import KeptBuffer, direct_scan
from nbparallel.distributed.collectives.exchange import Exchange, PreparedRecord
from nbparallel.distributed.collectives.movements import BARRIER, BROADCAST, Movement, Movements, Pattern
from nbparallel.distributed.operators import (
    LOCATING,
    Operator,
    combine,
    find_operator,
    operator_for,
    shown_dtype,
)
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    as_operand,
    as_plain_array,
    in_kind_of,
    read_only,
)
from nbparallel.distributed.slots.slot_protocol import PendingSlot, PendingSlots, SlotProtocol
from nbparallel.distributed.work import Work
from nbparallel.errors import IN_PLACE
from nbparallel.sharing.tensors import bits_name, fill_module, is_module, is_tensor
from nbparallel.wire.control import Operation

# Variants of all_reduce, whose bytes take the same routes: scan and exscan, maxloc and minloc.
#
# A scan combines each rank's own values with those of all lower ranks:
#
# * small arrays: the slots up to its own;
# * shared arrays: member i adds up slice i of all arrays, one after the other, and writes each sum on its
#   way;
# * others: the copies up to its own, a piece at a time.
#
# `maxloc` reduces pairs: a value and a location travel as one element of a structured dtype.

_LARGEST = np.iinfo(np.int64).max


class Scan(AllReduce):
    """One rank's side of `scan` in a group, or of `exscan`, which leaves its own values out."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, buffer: KeptBuffer, *, exclusive: bool
    ) -> None:
        super().__init__(context, protocol, buffer, None, Operation.exscan if exclusive else Operation.scan)
        self._exclusive = exclusive
        self._count = self._index if exclusive else self._index + 1

    def run(self, x: Any, op: str | Averaging, deadline_ns: int | None, line: int = 0) -> Any:
        """Combine `x` of the lower ranks, and its own; None if there are none, and `x` is as before."""
        found = super().run(x, op, deadline_ns, line)
        return found if self._count else None

    def _combine_numbers(self, operator: Operator, values: Sequence[Any]) -> Any:
        return combine_numbers(operator, values[: self._count]) if self._count else None

    def combine_slots(self, plan: ReductionSignature, views: list[AnyArray], x: AnyArray) -> None:
        """Combine what lies on the slots of lower ranks into `x`."""
        inputs = views[: self._count]
        if len(inputs) == 1:
            x[...] = inputs[0]
        elif inputs:
            with np.errstate(all="ignore"):
                combine(plan.operator, inputs, x)

    def _combine_directly(self, plan: ReductionSignature, arrays: list[AnyArray]) -> None:
        direct_scan(self._context, self._protocol, arrays, plan.operator, exclusive=self._exclusive)

    def _combine_copies(self, plan: ReductionSignature, flat: AnyArray) -> None:
        """Add up what lower ranks have copied: half of what it takes to write there as well."""
        for piece, arrays in self._buffer.pieces(self._protocol, flat):
            self.combine_slots(plan, arrays, flat[piece])
            self._protocol.synchronize()


class MaxLoc(AllReduce):
    """One rank's side of `maxloc` or `minloc` in a group."""

    def locate(self, pairs: Any, deadline_ns: int | None) -> tuple[Any, Any]:
        """Return the best values of all members and their locations; `pairs` are those of this one."""
        return separate(self.run(pairs, "", deadline_ns))

    def _plan(self, op: str | Averaging, x: AnyArray) -> ReductionSignature:
        operator = LOCATING[self._operation.name]
        plan = ReductionSignature(self._operation, operator, x.dtype, x.shape, self.inline_nbytes)
        self._remember((op, x.dtype, x.shape), plan)
        return plan

    def _all_reduce_other(self, x: Any, op: Any, deadline_ns: int | None) -> Any:
        return self._all_reduce_number(x, type(x[0]).__name__, LOCATING[self._operation.name], deadline_ns)


def pairs_of(x: Any, location: Any, operation: str) -> Any:
    """Return the pairs of what a rank passes: a new array of them, or a tuple for a number.

    Raises
    ------
    TypeError
        The values have no order, or a location is no integer.
    ValueError
        There are as many locations as there are not values.
    """
    where = np.asarray(location) if isinstance(location, int | np.integer) else as_operand(location)
    if where is None or where.dtype.kind not in "iu" or (where > _LARGEST).any():
        raise TypeError(
            f"the location of {operation} must be an int of 64 bits, or an array of them, not {location!r}"
        )
    operator = LOCATING[operation]
    array = as_operand(x)
    if array is None:
        value = check_number(operator, x, operation)
        if isinstance(value, complex | np.complexfloating):
            raise TypeError(f"{operation} needs an order, and complex numbers have none")
        if where.ndim:
            raise ValueError(f"the location of a number must be one int, not an array of shape {where.shape}")
        return value, int(location)
    if array.dtype.kind not in operator.kinds:
        hint = ": pass `x.float()`" if bits_name(array.dtype) else ""
        raise TypeError(
            f"{operation} needs real numbers, and this array has dtype {shown_dtype(array.dtype)}{hint}"
        )
    if where.ndim and where.shape != array.shape:
        raise ValueError(
            f"the location of {operation} must be one int or have the shape {array.shape} of the array, not "
            f"{where.shape}"
        )
    pairs = np.zeros(array.shape, np.dtype([("value", array.dtype), ("location", np.int64)], align=True))
    pairs["value"], pairs["location"] = array, where
    return pairs


def separate(pairs: Any) -> tuple[Any, Any]:
    """Return the values and the locations of pairs."""
    return pairs if isinstance(pairs, tuple) else (pairs["value"].copy(), pairs["location"].copy())


NonblockingCall = tuple[Movement, Callable[[list[Any]], Any]]
"""What is moved, and the function from what came from each source to what the operation returns."""


@dataclass(slots=True)
class PendingOperation:
    """One collective that has begun and is not complete."""

    movement: Movement
    complete: Callable[[list[Any]], Any]
    """Returns the operation's result, from what came from each source."""
    work: Work
    filled: Any = None
    """What the user passed to be filled: it is the result instead, unless None."""
    record: PreparedRecord | None = None
    slot: PendingSlot | None = None
    """None until there is a slot for it."""


class ProgressEngine:
    """The pending collectives of one group on this rank."""

    def __init__(self, pending_slots: PendingSlots, exchange: Exchange, changed: Callable[[], None]) -> None:
        self._pending_slots, self._exchange, self._changed = pending_slots, exchange, changed
        self._protocol = pending_slots.protocol
        self._queue: deque[PendingOperation] = deque()
        self._busy = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, pending: PendingOperation) -> None:
        """Begin a collective; its values are copied now, even if there is no slot yet."""
        pending.record = self._exchange.prepare(pending.movement)
        self._queue.append(pending)
        self._changed()
        self.advance()

    def advance(self) -> None:
        """Post and complete collectives as far as possible, without blocking."""
        if self._busy or not self._queue:
            return
        self._busy = True
        try:
            while self._queue:
                for pending in self._queue:
                    if pending.slot is None and pending.record is not None and self._protocol.has_free_slot():
                        pending.slot = self._exchange.post(
                            pending.movement, pending.record, pending.work.line
                        )
                    if pending.slot is None:
                        break
                first = self._queue[0]
                if first.slot is None or self._protocol.missing(first.slot.arrivals):
                    return
                self._finish(first, first.slot)
        finally:
            self._busy = False

    def _finish(self, pending: PendingOperation, slot: PendingSlot) -> None:
        """Complete a collective; an error of this call alone is raised by its `Work.wait`."""
        work, record = pending.work, pending.record
        assert record is not None, "a collective that has a slot has a record"
        try:
            found = self._exchange.collect(pending.movement, record, slot)
        except ValueError as error:  # overlapping memory: all members ended it, before any array was written
            work.fail(error)
        except BaseException as error:
            work.fail(error)
            raise
        else:
            try:
                value = pending.complete(found)
                work.finish(value if pending.filled is None else pending.filled)
            except Exception as error:  # noqa: BLE001 - the values of other members can raise anything when combined
                work.fail(error)
        finally:
            self._queue.popleft()
            self._changed()

    def flush(self, work: Work | None = None, deadline_ns: int | None = None) -> None:
        """Block until `work` is complete, or all pending collectives."""
        while self._queue and (work is None or not work.done):
            self.advance()
            if self._queue and (work is None or not work.done):
                self._busy = True  # the wait has changed the protocol: nothing may be posted until it ends
                try:
                    self._pending_slots.wait_for(self._queue[0].slot, deadline_ns)
                finally:
                    self._busy = False

    def poll(self, work: Work) -> None:
        """Advance without blocking; raises if `work` can never complete, so that no rank polls forever."""
        self.advance()
        first = self._queue[0] if self._queue and not work.done else None
        if first is not None and first.slot is not None and self._pending_slots.is_hopeless(first.slot):
            self.flush(work)

    def drop(self) -> None:
        """Drop all pending collectives at the end of their cell."""
        while self._queue:
            self._queue.popleft().work.drop()
        self._changed()


class NonblockingCalls:
    """The nonblocking form of each collective of one rank in one group."""

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self._ranks, self._index = ranks, index
        self._movements = Movements(ranks, index, nonblocking=True)

    def move(
        self,
        pattern: Pattern,
        values: Sequence[Any],
        outputs: Sequence[AnyArray],
        root: int | None,
        view: bool = False,
    ) -> NonblockingCall:
        """Move values, and return them; `view` is for calls that block."""
        movement = self._movements(pattern, values, outputs, root)
        return movement, movement.result

    def barrier(self) -> NonblockingCall:
        """Move nothing."""
        return self.move(BARRIER, (), (), None)

    def broadcast(self, x: Any, root: int) -> NonblockingCall:
        """Move the root's value to all members; returns `x` where it is the root's, or an array to fill."""
        mine = self._index == root
        array = None if mine else as_operand(x) if is_tensor(x) else as_plain_array(x)
        if array is not None and not array.flags.writeable:
            raise read_only(x, READ_ONLY)
        movement = self._movements(BROADCAST, (x,) if mine else (), () if array is None else (array,), root)
        if is_module(x) and not mine:
            return movement, lambda found: fill_module(x, found[0])
        return movement, lambda found: x if mine or array is not None else found[0]

    def _reduction(self, operation: Operation, x: Any, op: str) -> NonblockingCall:
        """Move all values to all members, which combine theirs in place: all of them, or those of some."""
        operator, value = _checked(x, op, operation.name, fills=True)
        count = {Operation.scan: self._index + 1, Operation.exscan: self._index}.get(operation)
        movement = self._moved(operation, operator, (value,))
        return movement, lambda found: None if count == 0 else _into(x, _combined(operator, found[:count]))

    all_reduce = functools.partialmethod(_reduction, Operation.all_reduce)
    scan = functools.partialmethod(_reduction, Operation.scan)
    exscan = functools.partialmethod(_reduction, Operation.exscan)

    def locate(self, operation: Operation, pairs: Any) -> NonblockingCall:
        """Move all pairs of values and locations to all members, which choose among them."""
        operator = LOCATING[operation.name]
        movement = self._moved(operation, operator, (pairs,))
        return movement, lambda found: separate(_combined(operator, found))

    def reduce(self, x: Any, root: int, op: str) -> NonblockingCall:
        """Move all values to the root, which combines them."""
        mine = self._index == root
        operator, value = _checked(x, op, "reduce", fills=False)
        movement = self._moved(Operation.reduce, operator, (value,), root)
        return movement, lambda found: _into(x, _combined(operator, found)) if mine else None

    def reduce_scatter(
        self, parts: Sequence[Any], whole: AnyArray | None, op: str, output: AnyArray | None
    ) -> NonblockingCall:
        """Move all parts each to its member, which combines them; the parts are copied, not the `whole`."""
        del whole
        checked = [_checked(part, op, "reduce_scatter", fills=False) for part in parts]
        operator, values = checked[0][0], [value for _, value in checked]
        mine = values[self._index]
        if output is not None and (output.dtype, output.shape) != (mine.dtype, mine.shape):
            raise ValueError(
                f"the output of reduce_scatter has dtype {output.dtype} and shape {output.shape}, and this "
                f"rank's part is {mine.dtype} {mine.shape}"
            )

        def complete(found: list[Any]) -> Any:
            total = _combined(operator, found)
            return total if output is None else _into(output, total)

        return self._moved(Operation.reduce_scatter, operator, values), complete

    def _moved(
        self, operation: Operation, operator: Operator, values: Sequence[Any], root: int | None = None
    ) -> Movement:
        forms = tuple([(x.dtype, x.shape) if isinstance(x, np.ndarray) else ("number", "-") for x in values])
        dtype, shapes = forms[0][0], tuple([shape for _, shape in forms])
        shown: Any = shapes[0] if len(shapes) == 1 else shapes
        if any(other != dtype for other, _ in forms):
            shown = forms
        rank = None if root is None else self._ranks[root]
        label = array_label(f"{operation.name}+async", operator.name, dtype, shown, rank)
        return self._movements.of_reduction(operation, label, values, root)


def _checked(x: Any, op: str, operation: str, *, fills: bool) -> tuple[Operator, Any]:
    """Return the operator, and the value as it enters: a plain array or a number."""
    operator = find_operator(op)
    array = as_operand(x)
    if array is not None:
        if fills and not array.flags.writeable:
            raise read_only(x, IN_PLACE.format(operation))
        return operator_for(operator, array.dtype), array
    return operator, check_number(operator, x, operation)


def _combined(operator: Operator, values: list[Any]) -> Any:
    """Return the combination in rank order."""
    if not isinstance(values[0], np.ndarray):
        return combine_numbers(operator, values)
    total = values[0]
    with np.errstate(all="ignore"):
        combine(operator, values, total)
    return total


def _into(x: Any, result: Any) -> Any:
    """Return `x`, filled with an array's result if it can be; else the result."""
    array = as_operand(x)
    if array is not None and array.flags.writeable:
        array[...] = result
        return x
    return in_kind_of(x, result)
