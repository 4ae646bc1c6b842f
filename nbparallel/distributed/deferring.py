"""What each collective is with ``async_op=True``: one exchange of letters, and what is made of them.

Every member brings copies, and combines them itself: no step but the first needs anybody's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.exchange import Labels, Movement
from nbparallel.distributed.operators import (
    Operator,
    check_dtype,
    check_number,
    combine_numbers,
    find_operator,
    is_number,
)
from nbparallel.distributed.runtime.shared_arrays import AnyArray, as_plain_array
from nbparallel.distributed.slots.fingerprint import Fingerprint, fingerprint
from nbparallel.wire.control import Operation

Plan = tuple[Movement, Callable[[list[Any]], Any]]
MAX_LABELS = 1024


class Deferring:
    """Describes the collectives of one rank in one group for later."""

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self._ranks, self._index = ranks, index
        self._everybody = range(len(ranks))
        self._movements: dict[Operation, Labels] = {}
        self._reductions: dict[Any, Fingerprint] = {}

    def _moved(
        self, operation: Operation, values: Sequence[Any], outputs: Sequence[AnyArray], root: int | None
    ) -> Fingerprint:
        labels = self._movements.get(operation)
        if labels is None:
            labels = self._movements[operation] = Labels(operation, self._ranks, later=True)
        return labels(values, outputs, root, view=False)

    def barrier(self) -> Plan:
        """Bring nothing."""
        label = self._moved(Operation.barrier, (), (), None)
        return Movement(Operation.barrier, label, (), (), {}), lambda _: None

    def broadcast(self, x: Any, root: int) -> Plan:
        """Bring the root's value to all."""
        mine = self._index == root
        array = None if mine else as_plain_array(x)
        if array is not None and not array.flags.writeable:
            raise ValueError("broadcast fills this array, and it is read-only: pass x.copy()")
        outputs = {} if array is None else {root: array}
        values = (x,) if mine else ()
        label = self._moved(Operation.broadcast, values, list(outputs.values()), root)
        movement = Movement(Operation.broadcast, label, values, (root,), outputs, root=root)
        return movement, lambda found: x if mine or array is not None else found[0]

    def all_gather(self, x: Any, outputs: Sequence[AnyArray]) -> Plan:
        """Bring everybody's value to all."""
        label = self._moved(Operation.all_gather, (x,), outputs, None)
        outs = dict(enumerate(outputs))
        return Movement(Operation.all_gather, label, (x,), self._everybody, outs), lambda found: found

    def gather(self, x: Any, root: int, outputs: Sequence[AnyArray]) -> Plan:
        """Bring everybody's value to the root."""
        mine = self._index == root
        label = self._moved(Operation.gather, (x,), outputs, root)
        movement = Movement(
            Operation.gather, label, (x,), self._everybody if mine else (), dict(enumerate(outputs)),
            root=root, to_root=True,
        )  # fmt: skip
        return movement, lambda found: found if mine else None

    def scatter(self, values: Sequence[Any], root: int, output: AnyArray | None) -> Plan:
        """Bring the root's values each to its member."""
        outputs = {} if output is None else {root: output}
        label = self._moved(Operation.scatter, values, list(outputs.values()), root)
        movement = Movement(Operation.scatter, label, values, (root,), outputs, root=root)
        return movement, lambda found: found[0]

    def all_to_all(self, values: Sequence[Any], outputs: Sequence[AnyArray]) -> Plan:
        """Bring everybody's values each to its member."""
        label = self._moved(Operation.all_to_all, values, outputs, None)
        outs = dict(enumerate(outputs))
        return Movement(Operation.all_to_all, label, values, self._everybody, outs), lambda found: found

    # -- reductions --------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: str) -> Plan:
        """Bring everybody's value to all, who combine them in place."""
        operator, value = _checked(x, op, "all_reduce", fills=True)
        label = self._reduced(Operation.all_reduce, operator, [value], None)
        movement = Movement(Operation.all_reduce, label, (value,), self._everybody, {})
        return movement, lambda found: _into(x, _combined(operator, found))

    def reduce(self, x: Any, root: int, op: str) -> Plan:
        """Bring everybody's value to the root, who combines them."""
        mine = self._index == root
        operator, value = _checked(x, op, "reduce", fills=False)
        label = self._reduced(Operation.reduce, operator, [value], root)
        movement = Movement(
            Operation.reduce, label, (value,), self._everybody if mine else (), {}, root=root, to_root=True
        )
        return movement, lambda found: _into(x, _combined(operator, found)) if mine else None

    def reduce_scatter(self, parts: Sequence[Any], op: str, output: AnyArray | None) -> Plan:
        """Bring everybody's parts each to its member, who combines them."""
        checked = [_checked(part, op, "reduce_scatter", fills=False) for part in parts]
        operator, values = checked[0][0], [value for _, value in checked]
        mine = values[self._index]
        if output is not None and (output.dtype, output.shape) != (mine.dtype, mine.shape):
            raise ValueError(
                f"the output of reduce_scatter has dtype {output.dtype} and shape {output.shape}, and this "
                f"rank's part is {mine.dtype} {mine.shape}"
            )
        label = self._reduced(Operation.reduce_scatter, operator, values, None)
        movement = Movement(Operation.reduce_scatter, label, values, self._everybody, {})

        def complete(found: list[Any]) -> Any:
            total = _combined(operator, found)
            return total if output is None else _into(output, total)

        return movement, complete

    def _reduced(
        self, operation: Operation, operator: Operator, values: Sequence[Any], root: int | None
    ) -> Fingerprint:
        forms = tuple([(x.dtype, x.shape) if isinstance(x, np.ndarray) else ("number", "-") for x in values])
        key = (operation, operator.name, forms, root)
        label = self._reductions.get(key)
        if label is None:
            if len(self._reductions) >= MAX_LABELS:
                self._reductions.clear()
            shapes = str(forms[0][1]) if len(forms) == 1 else str([shape for _, shape in forms])
            content = [(getattr(dtype, "str", "number"), shape) for dtype, shape in forms]
            rank = None if root is None else self._ranks[root]
            label = self._reductions[key] = fingerprint(
                f"{operation.name}+async", str(forms[0][0]), shapes, root=rank, operator=operator.name,
                content=content,
            )  # fmt: skip
        return label


def _checked(x: Any, op: str, operation: str, *, fills: bool) -> tuple[Operator, Any]:
    """Return the operator, and the value as it enters: a plain array or a number."""
    operator = find_operator(op)
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        check_dtype(operator, x.dtype)
        if fills and not x.flags.writeable:
            raise ValueError(f"{operation} works in place and this array is read-only: pass x.copy()")
        return operator, x.view(np.ndarray)
    if not is_number(x):
        raise TypeError(f"{operation} needs an array or a number, not {type(x).__name__}")
    return operator, check_number(operator, x)


def _combined(operator: Operator, values: list[Any]) -> Any:
    """Return the combination in rank order."""
    if not isinstance(values[0], np.ndarray):
        return combine_numbers(operator, values)
    total = values[0]
    with np.errstate(all="ignore"):
        for value in values[1:]:
            operator.ufunc(total, value, out=total)
        if operator.name == "avg" and len(values) > 1:
            np.true_divide(total, len(values), total)
    return total


def _into(x: Any, result: Any) -> Any:
    """Return `x`, filled with an array's result if it can be; else the result."""
    if isinstance(x, np.ndarray) and x.flags.writeable:
        x[...] = result
        return x
    return result
