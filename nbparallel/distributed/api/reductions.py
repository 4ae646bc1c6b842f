"""all_reduce, reduce, reduce_scatter and barrier, as a rank calls them."""

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
    elements_of,
    equal_parts,
    parts_of,
    value_and_outputs,
)
from nbparallel.distributed.runtime.shared_arrays import as_operand
from nbparallel.distributed.work import Work


class Reductions(OperationBase):
    """Operations that combine the values of all members of a group; all of them must call the same."""

    @overload
    def all_reduce(  # type: ignore[overload-overlap]
        self,
        tensor: int,
        op: Literal["avg"],
        group: GroupLike = None,
        async_op: Literal[False] = False,
        *,
        timeout: Timeout = None,
    ) -> float: ...

    @overload
    def all_reduce(
        self,
        tensor: bool,
        op: str = "sum",
        group: GroupLike = None,
        async_op: Literal[False] = False,
        *,
        timeout: Timeout = None,
    ) -> int: ...

    @overload
    def all_reduce(
        self,
        tensor: T,
        op: str = "sum",
        group: GroupLike = None,
        async_op: Literal[False] = False,
        *,
        timeout: Timeout = None,
    ) -> T: ...

    @overload
    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        *,
        async_op: Literal[True],
        timeout: Timeout = None,
    ) -> Work: ...

    @overload
    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        *,
        timeout: Timeout = None,
    ) -> Any: ...

    @predefined
    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        *,
        timeout: Timeout = None,
    ) -> Any:
        """Combine the values of all ranks, in rank order, and give every rank the result.

        Parameters
        ----------
        tensor : array, tensor or number
            An array is reduced in place, without a copy if every rank's lies in shared memory; so is a
            tensor, of which autograd records nothing (bfloat16 is rounded in every step).  Python's
            ints stay exact, and numbers of different types may be mixed.
        op : str or ReduceOp
            One of `ReduceOp`, or its name as in ``"sum"``.

        Returns
        -------
        array or number
            `tensor` itself if it is an array; the same bits on every rank.

        Raises
        ------
        CollectiveMismatchError
            On all ranks, before any array is touched.
        ValueError
            The array is read-only, or several ranks passed the same memory.
        """
        context = self._context
        if not (context.ready and context.plain) or group is not None or async_op:
            call = self._operation("all_reduce", group, timeout, async_op)
            return call.run("all_reduce", tensor, op)
        context.ready = False
        try:
            value = self._world.reductions.all_reduce(
                tensor, op, None if timeout is None else deadline(timeout)
            )
            context.ready = True
        except BaseException as error:
            context.failed(error)
            raise
        return value

    @overload
    def barrier(
        self,
        group: GroupLike = None,
        async_op: Literal[False] = False,
        device_ids: object = None,
        timeout: Timeout = None,
    ) -> None: ...

    @overload
    def barrier(
        self,
        group: GroupLike = None,
        *,
        async_op: Literal[True],
        device_ids: object = None,
        timeout: Timeout = None,
    ) -> Work: ...

    @overload
    def barrier(
        self,
        group: GroupLike = None,
        async_op: bool = False,
        device_ids: object = None,
        timeout: Timeout = None,
    ) -> Any: ...

    @predefined
    def barrier(
        self,
        group: GroupLike = None,
        async_op: bool = False,
        device_ids: object = None,
        timeout: Timeout = None,
    ) -> Any:
        """Return when every rank has called it; torch's `device_ids` have no effect here.

        Raises
        ------
        CollectiveTimeoutError
            The call timed out; it names the missing ranks.
        """
        context = self._context
        if not (context.ready and context.plain) or group is not None or async_op:
            call = self._operation("barrier", group, timeout, async_op)
            return call.run("barrier")
        context.ready = False
        try:
            self._world.barrier(None if timeout is None else deadline(timeout))
            context.ready = True
        except BaseException as error:
            context.failed(error)
            raise
        return None

    def monitored_barrier(
        self, group: GroupLike = None, timeout: Timeout = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has called it, or raise with the missing ranks after a time.

        Every rank checks by itself, and names all missing ranks, whatever `wait_all_ranks` is: here as
        in torch's scripts.  Without a `timeout` it is `barrier`.

        Raises
        ------
        CollectiveTimeoutError
            The call timed out; it names the missing ranks.
        """
        call = self._operation("monitored_barrier", group, timeout)
        call.run("monitored_barrier")

    @untraced
    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: str = "sum", group: GroupLike = None, async_op: bool = False
    ) -> Any:
        """Call `all_reduce` for each of several values: ``all_reduce_coalesced([x, y])``.

        Parameters
        ----------
        tensors : list of arrays or numbers
            Arrays are reduced in place, one after the other: if ranks differ in one, those before it are
            reduced already.  An array that is listed twice, as tied weights are, is reduced once.

        Returns
        -------
        list or Work
            The results; with `async_op` one `Work` for all.

        Raises
        ------
        ValueError
            Two arrays share memory in part; nothing was reduced.
        """
        check_list(tensors, "all_reduce_coalesced", "values")
        firsts: dict[Any, int] = {}
        first = [firsts.setdefault(elements_of(x) or i, i) for i, x in enumerate(tensors)]
        check_apart({f"tensors[{i}]": tensors[i] for i in firsts.values()}, "all_reduce_coalesced")
        once = {i: self.all_reduce(tensors[i], op, group, async_op) for i in firsts.values()}
        found = [once[i] for i in first]
        return self._combine(found, "all_reduce_coalesced") if async_op else found

    @overload
    def reduce(
        self,
        tensor: Any,
        dst: int | None = None,
        op: str = "sum",
        group: GroupLike = None,
        *,
        async_op: Literal[True],
        group_dst: int | None = None,
        timeout: Timeout = None,
    ) -> Work: ...

    @overload
    def reduce(
        self,
        tensor: Any,
        dst: int | None = None,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        group_dst: int | None = None,
        *,
        timeout: Timeout = None,
    ) -> Any: ...

    @predefined
    def reduce(
        self,
        tensor: Any,
        dst: int | None = None,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        group_dst: int | None = None,
        *,
        timeout: Timeout = None,
    ) -> Any:
        """Combine the values of all ranks, in rank order, and give rank `dst` the result.

        Parameters
        ----------
        tensor : array or number
            Everywhere the same shape and dtype; only that on `dst` may change.
        dst : int
            By default the first member.

        Returns
        -------
        array, number or None
            On `dst` the result: `tensor` itself if it is a writable array, which is filled, else a new one.
            None elsewhere.

        Raises
        ------
        CollectiveMismatchError
            On all ranks, before any array is touched.
        ValueError
            The array on `dst` would be written and is another rank's too.
        """
        call = self._operation("reduce", group, timeout, async_op)
        root = call.root(dst, group_dst, "dst")
        return call.run("reduce", tensor, root, op)

    @predefined
    def reduce_scatter(
        self,
        tensor: Any = MISSING,
        input_list: Any = MISSING,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        *,
        output: Any = MISSING,
        timeout: Timeout = None,
    ) -> Any:
        """Combine the values of all ranks, in rank order, and give every rank its part of the result.

        ``part = reduce_scatter(x)``, or as in torch ``reduce_scatter(output, input_list)``.

        Parameters
        ----------
        tensor : array, or sequence of arrays or numbers
            An array is split along axis 0, the first parts longer by one if it does not divide evenly; of a
            sequence element i is for rank i, and they may have different shapes.  With an `input_list`: the
            array to fill.
        input_list : sequence of arrays
            Element i of all ranks is combined for rank i.
        output : array, optional
            torch's name of the array to fill.

        Returns
        -------
        array or number
            This rank's part: a new array, or the one that was filled.

        Raises
        ------
        CollectiveMismatchError
            On all ranks, before any array is touched.
        ValueError
            Wrong sizes; or an output lies over another rank's shared memory.
        """
        call = self._operation("reduce_scatter", group, timeout, async_op)
        if output is not MISSING:
            if tensor is not MISSING or input_list is MISSING:
                raise TypeError("reduce_scatter fills output from an input_list: pass both, and no tensor")
            tensor = output
        values, to_fill = value_and_outputs(tensor, input_list, "reduce_scatter")
        target = None if to_fill is MISSING else check_output(to_fill, "reduce_scatter")
        array = values if type(values) is np.ndarray else as_operand(values)
        plain = values if array is None else array
        parts = parts_of(plain, call.size, "reduce_scatter")
        whole = plain if type(plain) is np.ndarray else None
        return call.run(
            "reduce_scatter", parts, whole, op, target,
            filled=None if target is None else tensor, like=parts[0] if plain is values else values,
        )  # fmt: skip

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
    ) -> Any:
        """Fill `output` with this rank's part of the combined `input`, which has it `world_size` times.

        Parameters
        ----------
        input : array
            Of all parts one behind the other along axis 0, or stacked along a first axis of `world_size`.
        """
        name = "reduce_scatter_tensor"
        call = self._operation(name, group, None, async_op)
        target = check_output(output, name)
        whole = as_operand(input)
        parts = equal_parts(input if whole is None else whole, target, call.size, name, "input")
        return call.run(
            "reduce_scatter", parts, whole, op, target,
            filled=output,
        )  # fmt: skip

    reduce_scatter_single = reduce_scatter_tensor
