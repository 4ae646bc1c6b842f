"""Data movements: which members send values, which take them, and what each call returns.

Each operation is one row of the table of patterns below.  A `Movement` is one call of one of them, as one
member makes it: a value that says what moves where, not how.  Blocking and nonblocking calls pass it to the
same `Exchange`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nbparallel.distributed.operators import shown_dtype
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.slots.fingerprint import Fingerprint, fingerprint
from nbparallel.sharing.tensors import is_tensor
from nbparallel.wire.control import Operation

Forms: TypeAlias = tuple[tuple[Any, Any], ...]
"""The dtype and shape of each value."""


class Members(enum.Enum):
    """The members of a group that send, or that take, in one operation."""

    ALL = enum.auto()
    ROOT = enum.auto()
    NONE = enum.auto()


_ALL, _ROOT = Members.ALL, Members.ROOT  # attributes of an enumeration are slow to look up


@dataclass(frozen=True, slots=True)
class Pattern:
    """The members that send and those that take, in one operation."""

    operation: Operation
    senders: Members = Members.ALL
    takers: Members = Members.ALL


# The table: a collective that only moves values is a row here.
BARRIER = Pattern(Operation.barrier, senders=Members.NONE, takers=Members.NONE)
BROADCAST = Pattern(Operation.broadcast, senders=Members.ROOT)
GATHER = Pattern(Operation.gather, takers=Members.ROOT)
ALL_GATHER = Pattern(Operation.all_gather)
SCATTER = Pattern(Operation.scatter, senders=Members.ROOT)
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

    def result(self, values: list[Any]) -> Any:
        """Return what the call returns, from what came from each source."""
        if not self.sources:
            return None
        return values[0] if self.from_root else values


@functools.lru_cache(maxsize=4096)
def _label(
    operation: Operation, nonblocking: bool, sent: Forms, expected: Forms, rank: int | None, view: bool
) -> Fingerprint:
    """Return the fingerprint of a call; dtypes and shapes are only in its text, for error messages."""
    dtypes = list(dict.fromkeys(map(shown_dtype, (dtype for dtype, _ in sent or expected))))
    shape = _shapes(sent) + (f" into {_shapes(expected)}" if expected else "")
    name = operation.name + ("+async" if nonblocking else "")
    return fingerprint(name, ", ".join(dtypes[:4]) or "-", shape, root=rank, operator="view" if view else "-")


def _form_key(value: Any) -> tuple[Any, Any]:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    if is_tensor(value):
        return str(value.dtype), tuple(value.shape)
    return type(value).__name__, None


def _shapes(forms: Forms) -> str:
    shapes = ["-" if shape is None else str(shape) for _, shape in forms]
    return shapes[0] if len(shapes) == 1 else f"[{', '.join(shapes)}]" if shapes else "-"


class Movements:
    """The movements of one rank in one group: makes each call's `Movement` from what the user passed."""

    def __init__(self, ranks: Sequence[int], index: int, *, nonblocking: bool = False) -> None:
        self._ranks, self._index, self._all = ranks, index, range(len(ranks))
        self._nonblocking = nonblocking

    def __call__(
        self,
        pattern: Pattern,
        values: Sequence[Any],
        outputs: Sequence[AnyArray] = (),
        root: int | None = None,
        view: bool = False,
    ) -> Movement:
        """Return one call.

        Parameters
        ----------
        outputs : sequence of array
            One for each source, or none.
        """
        operation, from_root, to_root = pattern.operation, pattern.senders is _ROOT, pattern.takers is _ROOT
        filled: dict[int, AnyArray] = {}
        if outputs:
            filled = {root: outputs[0]} if from_root and root is not None else dict(enumerate(outputs))
        sources: Sequence[int] = ()
        if pattern.takers is _ALL or (to_root and root == self._index):
            sources = (root,) if from_root and root is not None else self._all
        sent = tuple([_form_key(value) for value in values])
        expected = tuple([(x.dtype, x.shape) for x in outputs]) if outputs else ()
        rank = None if root is None else self._ranks[root]
        label = _label(operation, self._nonblocking, sent, expected, rank, view)
        return Movement(operation, label, values, sources, filled, root, from_root, to_root, view)

    def step(self, operation: Operation, shown: Any, value: Any) -> Movement:
        """Return a gathering of all members' values, as a step of an `operation` called with `shown`."""
        label = _label(operation, self._nonblocking, (_form_key(shown),), (), None, False)
        return Movement(operation, label, (value,), self._all, {})

    def of_reduction(
        self, operation: Operation, label: Fingerprint, values: Sequence[Any], root: int | None = None
    ) -> Movement:
        """Return the movement of a nonblocking reduction, whose takers combine what comes from all."""
        sources: Sequence[int] = self._all if root is None or root == self._index else ()
        return Movement(operation, label, values, sources, {}, root, False, root is not None)
