"""assert_same, as a rank calls it."""

from __future__ import annotations

from typing import Any

from nbparallel.distributed.api.operation_base import GroupLike, OperationBase, Timeout
from nbparallel.distributed.arguments import deadline
from nbparallel.distributed.equality.difference import digest_of, find_difference, flatten
from nbparallel.wire.control import Operation


class AssertSame(OperationBase):
    """Checks that the ranks of a group hold equal data."""

    def assert_same(self, x: Any, group: GroupLike = None, *, timeout: Timeout = None) -> None:
        """Raise on every rank, naming the ranks that differ and where, unless all hold equal data.

        All ranks must call it.  They exchange 16 bytes each.  Only if these differ, further exchanges locate
        the difference, in which only those pieces of arrays travel that differ.

        Parameters
        ----------
        x : array, number, or any picklable object
            Arrays or tensors of any dtype and layout are equal if dtype, shape and all elements' bytes are
            (0.0 and -0.0 are not); NaN equals NaN.  Numbers must be of the same type.  Lists, tuples, dicts
            (in whatever order of keys), views of them as ``d.keys()`` (in order), sets and objects are equal
            if their types and parts are; classes and functions if their names are, and a function's own code.

        Raises
        ------
        DifferentDataError
            On every rank, with the same message: which ranks agree, and for each other group of ranks the
            first place where it differs, both values, and how many elements do.  It is an `AssertionError`,
            and operations work after it.
        UnpicklableError
            On the caller: something in `x` cannot be compared.  Nothing was sent to the other ranks.
        """
        limit = deadline(timeout)
        state = self._group_state(group, crosses=True)
        digest = digest_of(flatten(x, exact=True))

        def exchange(value: Any) -> list[Any]:
            return self._exchange_values(state, Operation.assert_same, x, value, limit)

        if len(set(exchange(digest))) == 1:
            return
        error = find_difference(x, state.ranks, state.index, exchange)
        if error is not None:
            raise error
