"""Numbers: their exchange through the slots, the fastest way from all to all, and their combination."""

from __future__ import annotations

import functools
import marshal
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.operators import Operator
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.slots.fingerprint import Fingerprint
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.wire.control import Operation


def is_number(x: object) -> bool:
    """Return whether `x` is a number of Python or numpy."""
    return isinstance(x, int | float | complex | np.number | np.bool_)


def check_number(op: Operator, x: Any, operation: str) -> Any:
    """Return a number as an operation takes it: a bool counts as an int.

    Raises
    ------
    TypeError
        `x` is not a number, or the operator needs integers.
    """
    if not is_number(x):
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


def pack_number(x: Any) -> bytes:
    """Return a number as bytes: marshal for Python's types, pickle for numpy's."""
    return b"m" + marshal.dumps(x) if type(x) in (int, float, complex) else b"p" + pickle.dumps(x, 5)


def unpack_number(data: bytes) -> Any:
    """Undo `pack_number`."""
    return marshal.loads(data[1:]) if data[:1] == b"m" else pickle.loads(data[1:])


def exchange_numbers(
    context: RankContext, protocol: SlotProtocol, operation: Operation, label: Fingerprint, value: Any
) -> list[Any]:
    """Return the values of all members; each is a number, or anything else that fits into a slot."""
    packed = pack_number(value)
    if len(packed) > protocol.payload_nbytes:
        raise ValueError(f"a number of {len(packed)} bytes is too long for {operation.name}")
    protocol.begin(operation, label, context.call_site.line())
    protocol.put(packed)
    if not protocol.arrive_and_wait():
        protocol.compare()
    values = [unpack_number(bytes(protocol.get(i))) for i in range(len(protocol.ranks))]
    protocol.release()
    context.operations += 1
    return values
