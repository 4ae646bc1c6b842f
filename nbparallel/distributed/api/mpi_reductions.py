"""scan, exscan, maxloc and minloc, as a rank calls them: reductions that MPI has, and torch has not."""

from __future__ import annotations

from typing import Any, Literal, overload

from nbparallel.distributed.api.operation_base import GroupLike, OperationBase, T, Timeout
from nbparallel.distributed.work import Work
from nbparallel.wire.control import Operation


class MpiReductions(OperationBase):
    """Operations that combine the values of all members of a group; all of them must call the same."""

    @overload
    def scan(
        self,
        tensor: T,
        op: str = "sum",
        group: GroupLike = None,
        async_op: Literal[False] = False,
        *,
        timeout: Timeout = None,
    ) -> T: ...

    @overload
    def scan(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        *,
        async_op: Literal[True],
        timeout: Timeout = None,
    ) -> Work: ...

    @overload
    def scan(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        *,
        timeout: Timeout = None,
    ) -> Any: ...

    def scan(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        *,
        timeout: Timeout = None,
    ) -> Any:
        """Combine the values of all ranks up to this one, in rank order: a prefix sum.

        Parameters
        ----------
        tensor : array or number
            Everywhere the same shape and dtype; an array is replaced in place by the result.
        op : str or ReduceOp
            As in `all_reduce`; ``"avg"`` is the average of this rank's and all lower ones.

        Returns
        -------
        array or number
            `tensor` itself if it is an array.  On the last rank what `all_reduce` gives.

        Raises
        ------
        CollectiveMismatchError
            On all ranks, before any array is touched.
        ValueError
            The array is read-only, or several ranks passed the same memory.

        Notes
        -----
        ``MPI_Scan`` in place.  `exscan` leaves this rank's own value out.

        Examples
        --------
        >>> dist.scan(rank + 1)  # doctest: +SKIP
        1  # on rank 0; 3 on rank 1, 6 on rank 2
        """
        call = self._operation("scan", group, timeout, async_op)
        return call.run("scan", tensor, op)

    @overload
    def exscan(
        self,
        tensor: T,
        op: str = "sum",
        group: GroupLike = None,
        async_op: Literal[False] = False,
        *,
        timeout: Timeout = None,
    ) -> T | None: ...

    @overload
    def exscan(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        *,
        async_op: Literal[True],
        timeout: Timeout = None,
    ) -> Work: ...

    @overload
    def exscan(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        *,
        timeout: Timeout = None,
    ) -> Any: ...

    def exscan(
        self,
        tensor: Any,
        op: str = "sum",
        group: GroupLike = None,
        async_op: bool = False,
        *,
        timeout: Timeout = None,
    ) -> Any:
        """Combine the values of all ranks before this one, in rank order.

        With the lengths of parts it gives each rank where its part begins:
        ``start = dist.exscan(len(part)) or 0``.

        Parameters
        ----------
        tensor : array or number
            Everywhere the same shape and dtype; an array is replaced in place by the result.
        op : str or ReduceOp
            As in `all_reduce`.

        Returns
        -------
        array, number or None
            `tensor` itself if it is an array.  None on the first rank, before which there is none: its array
            stays as it was.

        Raises
        ------
        CollectiveMismatchError
            On all ranks, before any array is touched.
        ValueError
            The array is read-only, or several ranks passed the same memory.

        Notes
        -----
        ``MPI_Exscan`` in place.  None on the first rank is what mpi4py returns there.
        """
        call = self._operation("exscan", group, timeout, async_op)
        return call.run("exscan", tensor, op)

    def maxloc(
        self,
        tensor: Any,
        location: Any = None,
        group: GroupLike = None,
        async_op: bool = False,
        *,
        timeout: Timeout = None,
    ) -> Any:
        """Find the largest value of all ranks, and where it is: ``value, where = dist.maxloc(x)``.

        Parameters
        ----------
        tensor : array or number
            Everywhere the same shape and dtype, not complex.  An array is compared element by element, and
            stays as it is.
        location : int or array of ints, optional
            Where this rank's value is, such as an index; by default its rank.  For an array one for all
            elements, or one for each.

        Returns
        -------
        tuple
            The largest value, and its location; for an array two new arrays of its shape, the second of
            int64.  Of several equal values the lowest location.  NaN counts as largest, as in ``"max"``.

        Raises
        ------
        CollectiveMismatchError
            On all ranks.

        Notes
        -----
        ``MPI_Allreduce`` with ``MPI_MAXLOC``: in mpi4py ``comm.allreduce((x, rank), op=MPI.MAXLOC)``.

        Examples
        --------
        >>> loss, best = dist.minloc(loss)  # doctest: +SKIP
        >>> weights = broadcast(weights, src=best)  # doctest: +SKIP
        """
        return self._locate(Operation.maxloc, tensor, location, group, async_op, timeout)

    def minloc(
        self,
        tensor: Any,
        location: Any = None,
        group: GroupLike = None,
        async_op: bool = False,
        *,
        timeout: Timeout = None,
    ) -> Any:
        """Find the smallest value of all ranks, and where it is; in all else as `maxloc`.

        NaN counts as smallest, as in ``"min"``.
        """
        return self._locate(Operation.minloc, tensor, location, group, async_op, timeout)

    def _locate(
        self,
        operation: Operation,
        x: Any,
        location: Any,
        group: GroupLike,
        async_op: bool,
        timeout: Timeout,
    ) -> Any:
        call = self._operation(operation.name, group, timeout, async_op)
        return call.run("locate", operation, x, self.rank if location is None else location, like=x)
