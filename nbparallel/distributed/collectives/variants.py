"""Variants of all_reduce, whose bytes take the same routes: scan and exscan, maxloc and minloc.

A scan combines each rank's own values with those of all lower ranks:

* small arrays: the slots up to its own;
* shared arrays: member i adds up slice i of all arrays, one after the other, and writes each sum on its way;
* others: piece by piece from rank to rank, all of which work at different pieces (`StagingBuffers.scan`).

`maxloc` reduces pairs: a value and a location travel as one element of a structured dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.all_reduce import AllReduce, Averaging, ReductionSignature
from nbparallel.distributed.collectives.direct import direct_scan
from nbparallel.distributed.collectives.scalars import check_number, combine_numbers
from nbparallel.distributed.collectives.staging import StagingBuffers
from nbparallel.distributed.operators import LOCATING, Operator, combine, shown_dtype
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, as_operand
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.sharing.tensors import bits_name
from nbparallel.wire.control import Operation

_LARGEST = np.iinfo(np.int64).max


class Scan(AllReduce):
    """One rank's side of `scan` in a group, or of `exscan`, which leaves its own values out."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, staging: StagingBuffers, *, exclusive: bool
    ) -> None:
        super().__init__(context, protocol, staging, None, Operation.exscan if exclusive else Operation.scan)
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

    def _combine_directly(self, plan: ReductionSignature, x: AnyArray) -> None:
        direct_scan(self._context, self._protocol, x, plan.operator, exclusive=self._exclusive)

    def _offer(self, source: AnyArray) -> bytes:
        return self._staging.offer_prefix(source)

    def _combine_staged(self, plan: ReductionSignature, source: AnyArray) -> None:
        self._staging.scan(source, plan.operator, exclusive=self._exclusive)


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
