"""broadcast, gather, all_gather, scatter and all_to_all, as a rank calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.api._operation import GroupLike, OperationBase
from nbparallel.distributed.api.reductions import Timeout
from nbparallel.distributed.arguments import (
    MISSING,
    check_output,
    check_outputs,
    deadline,
    equal_parts,
    parts_of,
    rows_of,
    value_and_outputs,
)


class DataMovement(OperationBase):
    """Operations that move values between all members of a group; all of them must call the same.

    Values may be arrays of any dtype and layout, numbers, or any picklable object, and may differ from rank
    to rank.  What returns is the caller's own.  With ``view=True`` arrays in shared memory are not copied:
    read-only views of them return, which show what their owner writes later.
    """

    def broadcast(
        self,
        tensor: Any,
        src: int | None = None,
        group: GroupLike = None,
        async_op: bool = False,
        group_src: int | None = None,
        *,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Give every rank what rank `src` has; all ranks must call it.

        Parameters
        ----------
        src : int
            By default the first member.
        view : bool
            Return a read-only view of the root's shared array; the others pass None.

        Returns
        -------
        array or value
            On `src` its own.  Elsewhere: an array that was passed is filled and returned, and must have
            dtype and shape of the root's; for None (or a number) the root's value is returned as a new one.

        Raises
        ------
        CollectiveMismatchError
            On all ranks, before any array is touched.
        """
        limit = None if timeout is None else deadline(timeout)
        context = self._context
        if (
            group is None
            and not async_op
            and not view
            and context.ready
            and context.plain
            and group_src is None
        ):
            root = 0 if src is None else src
            if type(root) is not int or not 0 <= root < self.world_size:
                root = self._group_table.world.place(src, None, "src")
            context.ready = False
            try:
                value = self._world.broadcast(tensor, root, limit)
                context.ready = True
            except BaseException as error:
                context.failed(error)
                raise
            return value
        state = self._group_state(group)
        root = state.place(src, group_src, "src", state.ranks[0])
        if view and tensor is not None and state.index != root:
            raise ValueError(
                "broadcast with view=True returns the root's array: pass None on the other ranks"
            )
        if async_op:
            _refuse_views(view)
            return self._begin(state, "broadcast", lambda later: later.broadcast(tensor, root))
        return self._run(state, limit, lambda c: c.broadcast(tensor, root, limit, view=view))

    def all_gather(
        self,
        tensor_list: Any = MISSING,
        tensor: Any = MISSING,
        group: GroupLike = None,
        async_op: bool = False,
        *,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Give every rank the values of all: ``values = all_gather(x)``, or ``all_gather(arrays, x)``.

        Parameters
        ----------
        tensor_list : value, or list of arrays
            The value of this rank; with a `tensor`: one array for each rank, which are filled.
        tensor : array
            The value of this rank.
        view : bool
            Return read-only views of the shared arrays of all ranks.

        Returns
        -------
        list
            In the order of the group; sizes, dtypes and kinds may differ.

        Raises
        ------
        CollectiveMismatchError
            On all ranks: other calls, or a value does not fit the array that is to take it.  Nothing was
            written.
        ValueError
            A list of the wrong length, arrays that share memory, or memory that another rank uses.
        """
        limit = deadline(timeout)
        state = self._group_state(group)
        value, to_fill = value_and_outputs(tensor_list, tensor, "all_gather")
        outputs = _outputs(to_fill, len(state.ranks), "all_gather", view=view)
        if async_op:
            _refuse_views(view)
            return self._begin(
                state,
                "all_gather",
                lambda later: later.all_gather(value, outputs),
                tensor_list if outputs else None,
            )
        found = self._run(state, limit, lambda c: c.all_gather(value, outputs, limit, view=view))
        return tensor_list if outputs else found

    def gather(
        self,
        tensor: Any,
        gather_list: Any = None,
        dst: int | None = None,
        group: GroupLike = None,
        async_op: bool = False,
        group_dst: int | None = None,
        *,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Give rank `dst` the values of all: ``values = gather(x, dst=0)``.

        Parameters
        ----------
        gather_list : list of arrays, optional
            On `dst` only: one array for each rank, which are filled.
        dst : int
            By default the first member.

        Returns
        -------
        list or None
            On `dst` the values in the order of the group; None elsewhere.

        Raises
        ------
        CollectiveMismatchError, ValueError
            As `all_gather`.
        """
        limit = deadline(timeout)
        state = self._group_state(group)
        if isinstance(gather_list, int | np.integer):
            raise TypeError(f"gather takes a list of arrays as its second argument: write dst={gather_list}")
        root = state.place(dst, group_dst, "dst", state.ranks[0])
        outputs: list[Any] = []
        if gather_list is not None:
            if state.index != root:
                raise ValueError(f"only rank {state.ranks[root]}, the destination, passes a gather_list")
            outputs = _outputs(gather_list, len(state.ranks), "gather", view=view)
        if async_op:
            _refuse_views(view)
            return self._begin(
                state, "gather", lambda later: later.gather(tensor, root, outputs), gather_list or None
            )
        found = self._run(state, limit, lambda c: c.gather(tensor, root, outputs, limit, view=view))
        return gather_list if outputs else found

    def scatter(
        self,
        tensor: Any,
        scatter_list: Any = None,
        src: int | None = None,
        group: GroupLike = None,
        async_op: bool = False,
        group_src: int | None = None,
        *,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Give every rank its part of what rank `src` has: ``part = scatter(values, src=0)``.

        Parameters
        ----------
        tensor : sequence or array, or None
            On `src` a sequence with one value for each rank, or an array, which is split along axis 0, the
            first parts longer by one if it does not divide evenly.  Elsewhere None, or an array to fill.
        scatter_list : sequence, optional
            On `src`: the values; `tensor` is then the array to fill there.

        Returns
        -------
        value
            This rank's part, or the array that was filled.

        Raises
        ------
        CollectiveMismatchError
            On all ranks: other calls, or a part does not fit the array that is to take it.
        """
        limit = deadline(timeout)
        state = self._group_state(group)
        if isinstance(scatter_list, int | np.integer):
            raise TypeError(f"scatter takes the values as its second argument: write src={scatter_list}")
        root = state.place(src, group_src, "src", state.ranks[0])
        values: Sequence[Any] = ()
        output = None
        if state.index == root:
            if scatter_list is not None:
                output = None if tensor is None else check_output(tensor, "scatter")
            values = parts_of(tensor if scatter_list is None else scatter_list, len(state.ranks), "scatter")
        else:
            if scatter_list is not None:
                raise ValueError(f"only rank {state.ranks[root]}, the source, passes a scatter_list")
            if tensor is not None and not isinstance(tensor, np.ndarray):
                raise TypeError(
                    f"only rank {state.ranks[root]}, the source, passes values to scatter; the others pass "
                    f"None, or an array to fill, not {type(tensor).__name__}"
                )
            output = None if tensor is None else check_output(tensor, "scatter")
        if view and output is not None:
            raise ValueError("scatter with view=True returns views and fills no array")
        if async_op:
            _refuse_views(view)
            return self._begin(
                state,
                "scatter",
                lambda later: later.scatter(values, root, output),
                tensor if output is not None else None,
            )
        found = self._run(state, limit, lambda c: c.scatter(values, root, output, limit, view=view))
        return tensor if output is not None else found

    def all_to_all(
        self,
        output_tensor_list: Any = MISSING,
        input_tensor_list: Any = MISSING,
        group: GroupLike = None,
        async_op: bool = False,
        *,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Give every rank one value of every rank: ``received = all_to_all(values)``.

        Parameters
        ----------
        output_tensor_list : sequence or array
            Value i is for rank i; an array is split as in `scatter`.  With an `input_tensor_list`: one array
            for each rank, which are filled.
        input_tensor_list : sequence
            Value i is for rank i.

        Returns
        -------
        list
            Element i is what rank i had for this one.

        Raises
        ------
        CollectiveMismatchError, ValueError
            As `all_gather`.
        """
        limit = deadline(timeout)
        state = self._group_state(group)
        size = len(state.ranks)
        values, to_fill = value_and_outputs(output_tensor_list, input_tensor_list, "all_to_all")
        outputs = _outputs(to_fill, size, "all_to_all", view=view)
        parts = parts_of(values, size, "all_to_all")
        if async_op:
            _refuse_views(view)
            return self._begin(
                state,
                "all_to_all",
                lambda later: later.all_to_all(parts, outputs),
                output_tensor_list if outputs else None,
            )
        found = self._run(state, limit, lambda c: c.all_to_all(parts, outputs, limit, view=view))
        return output_tensor_list if outputs else found

    # -- one array for all parts -------------------------------------------------------------------------

    def all_gather_into_tensor(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: GroupLike = None,
        async_op: bool = False,
    ) -> Any:
        """Fill one array with the equal arrays of all ranks, behind each other or stacked; returns it."""
        state = self._group_state(group)
        output = check_output(output_tensor, "all_gather_into_tensor")
        if not isinstance(input_tensor, np.ndarray):
            raise TypeError(f"all_gather_into_tensor needs an array, not {type(input_tensor).__name__}")
        rows = equal_parts(output, input_tensor, len(state.ranks), "all_gather_into_tensor", "output_tensor")
        if async_op:
            return self._begin(
                state,
                "all_gather_into_tensor",
                lambda later: later.all_gather(input_tensor, rows),
                output_tensor,
            )
        self._run(state, None, lambda c: c.all_gather(input_tensor, rows, None, view=False))
        return output_tensor

    all_gather_single = all_gather_into_tensor

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: GroupLike = None,
        async_op: bool = False,
    ) -> Any:
        """Send the parts of one array along axis 0 to all ranks, and fill another with theirs; returns it.

        Parameters
        ----------
        output_split_sizes, input_split_sizes : sequence of int, optional
            Rows from and for each rank, 0 allowed; by default equal parts.
        """
        state = self._group_state(group)
        size, name = len(state.ranks), "all_to_all_single"
        target = check_output(output, name)
        outputs = rows_of(target, output_split_sizes, size, name, "output")
        parts = rows_of(input, input_split_sizes, size, name, "input")
        if async_op:
            return self._begin(
                state, "all_to_all_single", lambda later: later.all_to_all(parts, outputs), output
            )
        self._run(state, None, lambda c: c.all_to_all(parts, outputs, None, view=False))
        return output


def _refuse_views(view: bool) -> None:
    if view:
        raise ValueError("view=True copies nothing and takes no time: leave async_op=True out")


def _outputs(outputs: Any, size: int, operation: str, *, view: bool) -> list[Any]:
    if outputs is MISSING:
        return []
    if view:
        raise ValueError(f"{operation} with view=True returns views and fills no array")
    return list(check_outputs(outputs, size, operation, "the list of arrays to fill"))
