"""broadcast, gather, all_gather, scatter and all_to_all, as a rank calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np

from nbparallel.distributed.api.operation_base import (
    GroupLike,
    OperationBase,
    T,
    Timeout,
    predefined,
    untraced,
)
from nbparallel.distributed.arguments import (
    MISSING,
    check_apart,
    check_list,
    check_output,
    deadline,
    equal_parts,
    parts_of,
    rows_of,
    value_and_outputs,
)
from nbparallel.distributed.collectives.movements import ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER, SCATTER
from nbparallel.distributed.runtime.shared_arrays import as_operand
from nbparallel.distributed.work import Work
from nbparallel.errors import ReadOnlyArrayError


class DataMovement(OperationBase):
    """Operations that move values between all members of a group; all of them must call the same.

    Values may be arrays or tensors of any dtype and layout, numbers, or any picklable object, and may differ
    from rank to rank.  What returns is the caller's own, a tensor where a tensor was brought.  With
    ``view=True`` arrays in shared memory are not copied: read-only views of them return, which show what
    their owner writes later (of tensors, views that can be written to).
    """

    @overload
    def broadcast(
        self,
        tensor: None,
        src: int | None = None,
        group: GroupLike = None,
        async_op: Literal[False] = False,
        group_src: int | None = None,
        *,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Any: ...

    @overload
    def broadcast(
        self,
        tensor: T,
        src: int | None = None,
        group: GroupLike = None,
        async_op: Literal[False] = False,
        group_src: int | None = None,
        *,
        view: bool = False,
        timeout: Timeout = None,
    ) -> T: ...

    @overload
    def broadcast(
        self,
        tensor: Any,
        src: int | None = None,
        group: GroupLike = None,
        *,
        async_op: Literal[True],
        group_src: int | None = None,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Work: ...

    @overload
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
    ) -> Any: ...

    @predefined
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
            On `src` its own.  Elsewhere: an array or tensor that was passed is filled and returned, and its
            dtype and shape must be the root's; a module of torch takes the parameters and buffers of the
            root's and is returned; for None (or a number) the root's value returns as a new one.

        Raises
        ------
        CollectiveMismatchError
            On all ranks, before any array is touched.
        """
        context = self._context
        if (
            group is None
            and not async_op
            and not view
            and context.ready
            and context.plain
            and group_src is None
        ):
            limit = None if timeout is None else deadline(timeout)
            root = 0 if src is None else src
            if type(root) is not int or not 0 <= root < self.world_size:
                root = self._group_table.world.group_rank(src, None, "src")
            context.ready = False
            try:
                value = self._world.broadcast(tensor, root, limit)
                context.ready = True
            except BaseException as error:
                context.failed(error)
                raise
            return value
        call = self._operation("broadcast", group, timeout, async_op, view=view)
        root = call.root(src, group_src, "src")
        if view:
            mine = call.state.index == root
            if tensor is not None and not mine:
                raise ValueError(
                    "broadcast with view=True returns the root's array: pass None on the other ranks"
                )
            return call.move(BROADCAST, (tensor,) if mine else (), root=root)
        return call.run("broadcast", tensor, root)

    @overload
    def all_gather(
        self,
        tensor_list: T,
        *,
        group: GroupLike = None,
        async_op: Literal[False] = False,
        view: bool = False,
        timeout: Timeout = None,
    ) -> list[T]: ...

    @overload
    def all_gather(
        self,
        tensor_list: Any = ...,
        tensor: Any = ...,
        group: GroupLike = None,
        *,
        async_op: Literal[True],
        view: bool = False,
        timeout: Timeout = None,
    ) -> Work: ...

    @overload
    def all_gather(
        self,
        tensor_list: Any = ...,
        tensor: Any = ...,
        group: GroupLike = None,
        async_op: bool = False,
        *,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Any: ...

    @predefined
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
        call = self._operation("all_gather", group, timeout, async_op, view=view)
        value, to_fill = value_and_outputs(tensor_list, tensor, "all_gather")
        outputs = call.outputs(to_fill)
        return call.move(ALL_GATHER, (value,), outputs, filled=tensor_list if outputs else None)

    @untraced
    def all_gather_coalesced(
        self,
        output_tensor_lists: Sequence[Sequence[Any]],
        input_tensor_list: Sequence[Any],
        group: GroupLike = None,
        async_op: bool = False,
    ) -> Any:
        """Call `all_gather` for each of several arrays.

        Parameters
        ----------
        output_tensor_lists : list of lists of arrays
            ``output_tensor_lists[r][i]`` is filled with array i of rank r.
        input_tensor_list : list of arrays
            Of this rank.

        Returns
        -------
        list or Work
            `output_tensor_lists`; with `async_op` one `Work` for all.
        """
        name = "all_gather_coalesced"
        check_list(input_tensor_list, name, "arrays")
        check_list(output_tensor_lists, name, "lists of arrays, one for each rank")
        for outputs in output_tensor_lists:
            check_list(outputs, name, "lists of arrays, one for each rank")
            if len(outputs) != len(input_tensor_list):
                raise ValueError(
                    f"{name}: a list to fill has {len(outputs)} arrays, and each rank brings "
                    f"{len(input_tensor_list)}"
                )
        places = ((r, i) for r in range(len(output_tensor_lists)) for i in range(len(input_tensor_list)))
        check_apart({f"output_tensor_lists[{r}][{i}]": output_tensor_lists[r][i] for r, i in places}, name)
        rows = [[outputs[i] for outputs in output_tensor_lists] for i in range(len(input_tensor_list))]
        found = [
            self.all_gather(row, x, group, async_op) for row, x in zip(rows, input_tensor_list, strict=True)
        ]
        return self._combine(found, name) if async_op else output_tensor_lists

    @overload
    def gather(
        self,
        tensor: Any,
        gather_list: Any = None,
        dst: int | None = None,
        group: GroupLike = None,
        *,
        async_op: Literal[True],
        group_dst: int | None = None,
        view: bool = False,
        timeout: Timeout = None,
    ) -> Work: ...

    @overload
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
    ) -> Any: ...

    @predefined
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
        CollectiveTimeoutError
            The call timed out: members are missing, or `dst` has not read a large array of this rank yet.
        """
        call = self._operation("gather", group, timeout, async_op, view=view)
        if isinstance(gather_list, int | np.integer):
            raise TypeError(f"gather takes a list of arrays as its second argument: write dst={gather_list}")
        root = call.root(dst, group_dst, "dst")
        outputs: list[Any] = []
        if gather_list is not None:
            if call.state.index != root:
                raise ValueError(f"only rank {call.state.ranks[root]}, the destination, passes a gather_list")
            outputs = call.outputs(gather_list)
        return call.move(GATHER, (tensor,), outputs, root, filled=gather_list if outputs else None)

    @predefined
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
        CollectiveTimeoutError
            The call timed out: members are missing, or, on `src`, one has not read its large part yet.
        """
        call = self._operation("scatter", group, timeout, async_op, view=view)
        if isinstance(scatter_list, int | np.integer):
            raise TypeError(f"scatter takes the values as its second argument: write src={scatter_list}")
        root = call.root(src, group_src, "src")
        source = call.state.ranks[root]
        values: Sequence[Any] = ()
        to_fill = tensor
        if call.state.index == root:
            to_fill = None if scatter_list is None else tensor
            values = parts_of(tensor if scatter_list is None else scatter_list, call.size, "scatter")
        elif scatter_list is not None:
            raise ValueError(f"only rank {source}, the source, passes a scatter_list")
        elif tensor is not None and (array := as_operand(tensor)) is None:
            raise TypeError(
                f"{_only_the_source(source, call.state.ranks)}; the others may pass an array to fill, and no "
                f"{type(tensor).__name__}"
            )
        elif tensor is not None and array is not None and not array.flags.writeable:
            raise ReadOnlyArrayError(
                f"{_only_the_source(source, call.state.ranks)}; the others may pass an array to fill, and "
                "this one is read-only. Of an array that every rank has, `dist.shard(x)` is this rank's part"
            )
        outputs = [] if to_fill is None else [check_output(to_fill, "scatter")]
        if view and outputs:
            raise ValueError("scatter with view=True returns views and fills no array")
        return call.move(SCATTER, values, outputs, root, filled=to_fill)

    @predefined
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
        call = self._operation("all_to_all", group, timeout, async_op, view=view)
        values, to_fill = value_and_outputs(output_tensor_list, input_tensor_list, "all_to_all")
        outputs = call.outputs(to_fill)
        parts = parts_of(values, call.size, "all_to_all")
        return call.move(ALL_TO_ALL, parts, outputs, filled=output_tensor_list if outputs else None)

    # -- one array for all parts -------------------------------------------------------------------------

    def all_gather_into_tensor(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: GroupLike = None,
        async_op: bool = False,
    ) -> Any:
        """Fill one array with the equal arrays of all ranks, behind each other or stacked; returns it."""
        call = self._operation("all_gather_into_tensor", group, None, async_op)
        output = check_output(output_tensor, "all_gather_into_tensor")
        value = as_operand(input_tensor)
        if value is None:
            raise TypeError(f"all_gather_into_tensor needs an array, not {type(input_tensor).__name__}")
        rows = equal_parts(output, value, call.size, "all_gather_into_tensor", "output_tensor")
        return call.move(ALL_GATHER, (value,), rows, filled=output_tensor)

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
        name = "all_to_all_single"
        call = self._operation(name, group, None, async_op)
        target = check_output(output, name)
        outputs = rows_of(target, output_split_sizes, call.size, name, "output")
        parts = rows_of(input, input_split_sizes, call.size, name, "input")
        return call.move(ALL_TO_ALL, parts, outputs, filled=output)


def _only_the_source(source: int, ranks: Sequence[int]) -> str:
    """Return what to write if a rank that is not the source passes values to `scatter`."""
    named = "" if source == ranks[0] else f", src={source}"
    return (
        f"only rank {source}, the source, passes values to scatter: write "
        f"`scatter(x if rank == {source} else None{named})`"
    )
