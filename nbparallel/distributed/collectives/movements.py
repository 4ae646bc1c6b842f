"""Calls: which members send values, which take them, and what each call returns.

An operation that only moves values is one row of the table of patterns below.  A `Movement` is one call of
an operation, as one member makes it: a value that says what moves where, not how.  Blocking and nonblocking
calls pass it to the same `Exchange`.  What combines values moves them to every member that takes the result,
which combines them itself; small and large arrays of some blocking operations take quicker ways (`reduce`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nbparallel.distributed.operators import (
    LOCATING,
    Operator,
    combine,
    find_operator,
    operator_for,
    shown_dtype,
)
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    as_operand,
    as_plain_array,
    in_kind_of,
    read_only,
)
from nbparallel.distributed.slots.slot_area import Fingerprint, fingerprint
from nbparallel.errors import IN_PLACE
from nbparallel.sharing.tensors import bits_name, fill_module, is_module, is_tensor
from nbparallel.wire.control import Operation

Forms: TypeAlias = tuple[tuple[Any, Any], ...]
"""The dtype and shape of each value."""
READ_ONLY = (
    "broadcast fills this array on all ranks but the source, and it is read-only: pass `x.copy()`, which is "
    "filled and returned, or None there to get a new one"
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The members that send and those that take, in one operation: all, or the root."""

    operation: Operation
    from_root: bool = False
    to_root: bool = False


# The table: a collective that only moves values is a row here.
BROADCAST = Pattern(Operation.broadcast, from_root=True)
GATHER = Pattern(Operation.gather, to_root=True)
ALL_GATHER = Pattern(Operation.all_gather)
SCATTER = Pattern(Operation.scatter, from_root=True)
ALL_TO_ALL = Pattern(Operation.all_to_all)


@dataclass(slots=True)  # to freeze it takes four times as long
class Movement:
    """One call of an operation that moves values, as one member makes it; never changed."""

    operation: Operation
    fingerprint: Fingerprint
    values: Sequence[Any]
    """What this member sends: nothing, one value for all takers, or one for each member."""
    sources: Sequence[int]
    """The members from which this one takes."""
    outputs: Mapping[int, AnyArray]
    """Arrays to fill, by the member whose value they take; one for each source, or none."""
    root: int | None = None
    from_root: bool = False
    """Whether only the root sends."""
    to_root: bool = False
    """Whether only the root takes."""
    view: bool = False
    target: AnyArray | None = None
    """What this member writes with what it combines, or has a right to find unchanged."""

    def result(self, values: list[Any]) -> Any:
        """Return what the call returns, from what came from each source."""
        if not self.sources:
            return None
        return values[0] if self.from_root else values


Call: TypeAlias = tuple[Movement, Callable[[list[Any]], Any]]
"""What is moved, and the function from what came from each source to what the operation returns."""


@functools.lru_cache(maxsize=4096)
def _label(name: str, sent: Forms, expected: Forms, rank: int | None, view: bool) -> Fingerprint:
    """Return the fingerprint of a call; dtypes and shapes are only in its text, for error messages."""
    dtypes = list(dict.fromkeys(map(shown_dtype, (dtype for dtype, _ in sent or expected))))
    shape = _shapes(sent) + (f" into {_shapes(expected)}" if expected else "")
    return fingerprint(name, ", ".join(dtypes[:4]) or "-", shape, root=rank, operator="view" if view else "-")


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


def _form_key(value: Any) -> tuple[Any, Any]:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    if is_tensor(value):
        return str(value.dtype), tuple(value.shape)
    return type(value).__name__, None


def _shapes(forms: Forms) -> str:
    shapes = ["-" if shape is None else str(shape) for _, shape in forms]
    return shapes[0] if len(shapes) == 1 else f"[{', '.join(shapes)}]" if shapes else "-"


class Calls:
    """The calls of one rank in one group: makes each one's `Movement` from what the user passed.

    Those that are nonblocking match no others.
    """

    def __init__(self, ranks: Sequence[int], index: int, *, nonblocking: bool = False) -> None:
        self._ranks, self._index, self._all = ranks, index, range(len(ranks))
        self._suffix = "+async" if nonblocking else ""

    def movement(
        self,
        pattern: Pattern,
        values: Sequence[Any],
        outputs: Sequence[AnyArray] = (),
        root: int | None = None,
        view: bool = False,
    ) -> Movement:
        """Return one call that moves values as a pattern says.

        Parameters
        ----------
        outputs : sequence of array
            One for each source, or none.
        """
        operation, from_root, to_root = pattern.operation, pattern.from_root, pattern.to_root
        filled: dict[int, AnyArray] = {}
        if outputs:
            filled = {root: outputs[0]} if from_root and root is not None else dict(enumerate(outputs))
        sources: Sequence[int] = ()
        if not to_root or root == self._index:
            sources = (root,) if from_root and root is not None else self._all
        sent = tuple([_form_key(value) for value in values])
        expected = tuple([(x.dtype, x.shape) for x in outputs]) if outputs else ()
        rank = None if root is None else self._ranks[root]
        label = _label(operation.name + self._suffix, sent, expected, rank, view)
        return Movement(operation, label, values, sources, filled, root, from_root, to_root, view)

    def move(self, *args: Any) -> Call:
        """Move values as `movement` says, and return them."""
        movement = self.movement(*args)
        return movement, movement.result

    def step(self, operation: Operation, shown: Any, value: Any) -> Movement:
        """Return a gathering of all members' values, as a step of an `operation` called with `shown`."""
        label = _label(operation.name + self._suffix, (_form_key(shown),), (), None, False)
        return Movement(operation, label, (value,), self._all, {})

    def barrier(self) -> Call:
        """Move nothing."""
        movement = Movement(Operation.barrier, fingerprint(f"barrier{self._suffix}"), (), (), {})
        return movement, movement.result

    def broadcast(self, x: Any, root: int) -> Call:
        """Move the root's value to all members; returns `x` where it is the root's, or an array to fill."""
        mine = self._index == root
        array = None if mine else as_operand(x) if is_tensor(x) else as_plain_array(x)
        if array is not None and not array.flags.writeable:
            raise read_only(x, READ_ONLY)
        movement = self.movement(BROADCAST, (x,) if mine else (), () if array is None else (array,), root)
        if is_module(x) and not mine:
            return movement, lambda found: fill_module(x, found[0])
        return movement, lambda found: x if mine or array is not None else found[0]

    # -- reductions ------------------------------------------------------------------------------------

    def _in_place(self, operation: Operation, x: Any, op: str) -> Call:
        """Move values to all members, which combine them in place: those of all, or of lower members."""
        operator, value = checked_value(x, op, operation.name, fills=True)
        sources: Sequence[int] = self._all
        if operation is not Operation.all_reduce:
            sources = self._all[: self._index + (operation is Operation.scan)]
        movement = self._moved(operation, operator, (value,), sources)
        movement.target = value if isinstance(value, np.ndarray) else None
        return movement, lambda found: into_operand(x, _combined(operator, found)) if found else None

    def all_reduce(self, x: Any, op: str) -> Call:
        """Move all values to all members."""
        return self._in_place(Operation.all_reduce, x, op)

    def scan(self, x: Any, op: str) -> Call:
        """Move values to this member and all above it."""
        return self._in_place(Operation.scan, x, op)

    def exscan(self, x: Any, op: str) -> Call:
        """Move values to all members above this one."""
        return self._in_place(Operation.exscan, x, op)

    def locate(self, operation: Operation, x: Any, location: Any) -> Call:
        """Move all pairs of values and locations to all members, which choose among them."""
        operator, pairs = LOCATING[operation.name], _pairs_of(x, location, operation.name)
        movement = self._moved(operation, operator, (pairs,), self._all)

        def complete(found: list[Any]) -> tuple[Any, Any]:
            best = _combined(operator, found)
            return best if isinstance(best, tuple) else (best["value"].copy(), best["location"].copy())

        return movement, complete

    def reduce(self, x: Any, root: int, op: str) -> Call:
        """Move all values to the root, which combines them."""
        operator, value = checked_value(x, op, "reduce", fills=False)
        sources = self._all if self._index == root else ()
        movement = self._moved(Operation.reduce, operator, (value,), sources, root)
        return movement, lambda found: into_operand(x, _combined(operator, found)) if found else None

    def reduce_scatter(
        self, parts: Sequence[Any], whole: AnyArray | None, op: str, output: AnyArray | None
    ) -> Call:
        """Move all parts each to its member, which combines them; the parts are copied, not the `whole`."""
        operator, values = checked_parts(parts, whole, op, output, self._index)

        def complete(found: list[Any]) -> Any:
            total = _combined(operator, found)
            return total if output is None else into_operand(output, total)

        return self._moved(Operation.reduce_scatter, operator, values, self._all), complete

    def _moved(
        self,
        operation: Operation,
        operator: Operator,
        values: Sequence[Any],
        sources: Sequence[int],
        root: int | None = None,
    ) -> Movement:
        name, first, many = operation.name + self._suffix, values[0], len(values) > 1
        rank = None if root is None else self._ranks[root]
        if isinstance(first, np.ndarray):
            shape: Any = tuple([value.shape for value in values]) if many else first.shape
            label = array_label(name, operator.name, first.dtype, shape, rank)
        else:
            kind = type(first[0] if isinstance(first, tuple) else first).__name__
            label = number_label(name, "numbers" if many else kind, operator.name, rank)
        return Movement(operation, label, values, sources, {}, root, False, root is not None)


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


def checked_parts(
    parts: Sequence[Any], whole: AnyArray | None, op: str, output: AnyArray | None, index: int
) -> tuple[Operator, list[Any]]:
    """Return the operator of `reduce_scatter`, and the parts for all members as plain arrays or numbers.

    Parameters
    ----------
    whole : array, optional
        What they are the parts of.
    output : array, optional
        To be filled with part `index`.
    """
    operator = find_operator(op)
    arrays = [as_operand(part) for part in parts]
    if whole is None and all(array is None for array in arrays):
        return operator, [check_number(operator, part, "reduce_scatter") for part in parts]
    plain: list[AnyArray] = []
    for part, array in zip(parts, arrays, strict=True):
        if array is None:
            raise TypeError(
                f"reduce_scatter needs arrays or numbers, and part {len(plain)} is {type(part).__name__}"
            )
        if plain and array.dtype != plain[0].dtype:
            raise TypeError(
                f"the parts of reduce_scatter must have one dtype, not {shown_dtype(plain[0].dtype)} and "
                f"{shown_dtype(array.dtype)}"
            )
        plain.append(array)
    mine = plain[index]
    if output is not None and (output.dtype, output.shape) != (mine.dtype, mine.shape):
        raise ValueError(
            f"the output of reduce_scatter has dtype {shown_dtype(output.dtype)} and shape "
            f"{output.shape}, and this rank's part is {shown_dtype(mine.dtype)} {mine.shape}"
        )
    return operator_for(operator, mine.dtype), plain


def checked_value(x: Any, op: str, operation: str, *, fills: bool) -> tuple[Operator, Any]:
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


def into_operand(x: Any, result: Any) -> Any:
    """Return `x`, filled with an array's result if it can be; else the result."""
    array = as_operand(x)
    if array is not None and array.flags.writeable:
        array[...] = result
        return x
    return in_kind_of(x, result)


# Pairs of a value and a location, which `maxloc` combines: they travel as elements of a structured dtype.

_LARGEST = np.iinfo(np.int64).max


def _pairs_of(x: Any, location: Any, operation: str) -> Any:
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
