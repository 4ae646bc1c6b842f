"""torch's operations on lists of objects, as a rank calls them; the others take objects as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbparallel.distributed.api.operation_base import GroupLike, OperationBase
from nbparallel.distributed.arguments import PROC_NULL
from nbparallel.distributed.collectives.movements import ALL_GATHER, GATHER, SCATTER


class ObjectLists(OperationBase):
    """Operations on lists of objects; torch's `device`, `use_batch` and `weights_only` mean nothing here."""

    send: Callable[..., None]
    recv: Callable[..., Any]

    def all_gather_object(self, object_list: list[Any], obj: Any, group: GroupLike = None) -> None:
        """Fill a list, one element for each rank, with the objects of all."""
        call = self._operation("all_gather_object", group)
        _check_list(object_list, "all_gather_object", call.size)
        object_list[:] = call.move(ALL_GATHER, (obj,))

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: GroupLike = None,
        group_dst: int | None = None,
    ) -> None:
        """Fill a list on rank `dst`, one element for each rank, with the objects of all."""
        call = self._operation("gather_object", group)
        root = call.root(dst, group_dst, "dst")
        if call.state.index == root:
            _check_list(object_gather_list, "gather_object", call.size)
        elif object_gather_list is not None:
            raise ValueError(
                f"only rank {call.state.ranks[root]}, the destination, passes an object_gather_list"
            )
        found = call.move(GATHER, (obj,), (), root)
        if found is not None and object_gather_list is not None:
            object_gather_list[:] = found

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: GroupLike = None,
        device: object = None,
        group_src: int | None = None,
    ) -> None:
        """Replace the elements of a list by those of the list on rank `src`, which has the same length."""
        _check_list(object_list, "broadcast_object_list")
        call = self._operation("broadcast_object_list", group)
        root = call.root(src, group_src, "src")
        value = object_list if call.state.index == root else None
        found = call.run("broadcast", value, root)
        if len(found) != len(object_list):
            raise ValueError(
                f"the list on rank {call.state.ranks[root]} has length {len(found)}, this one "
                f"{len(object_list)}"
            )
        object_list[:] = found

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: GroupLike = None,
        group_src: int | None = None,
    ) -> None:
        """Put this rank's of the objects on rank `src` into the first element of the output list."""
        if not _check_list(scatter_object_output_list, "scatter_object_list"):
            raise ValueError("scatter_object_list needs an output list with at least one element")
        call = self._operation("scatter_object_list", group)
        root = call.root(src, group_src, "src")
        values: list[Any] = []
        if call.state.index == root:
            values = _check_list(scatter_object_input_list, "scatter_object_list", call.size)
        scatter_object_output_list[0] = call.move(SCATTER, values, (), root)

    def send_object_list(
        self,
        object_list: list[Any],
        dst: int | None = None,
        group: GroupLike = None,
        device: object = None,
        group_dst: int | None = None,
        use_batch: bool = False,
    ) -> None:
        """Send a list of any objects to rank `dst`, which must call `recv_object_list`."""
        _check_list(object_list, "send_object_list")
        self.send(object_list, dst, group, group_dst=group_dst)

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: GroupLike = None,
        device: object = None,
        group_src: int | None = None,
        use_batch: bool = False,
    ) -> int:
        """Replace the elements of a list by those of the list that was sent; return the sender.

        Raises
        ------
        ValueError
            The list that was sent has another length; the elements stay as they were.
        """
        _check_list(object_list, "recv_object_list")
        value, source = self.recv(None, src, group, 0, group_src, return_source=True)
        if source == PROC_NULL:
            return PROC_NULL
        if not isinstance(value, list) or len(value) != len(object_list):
            sent = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
            raise ValueError(
                f"rank {source} sent {sent}, and the list to fill has {len(object_list)} elements"
            )
        object_list[:] = value
        return int(source)


def _check_list(values: Any, operation: str, size: int | None = None) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError(f"{operation} needs a list, not {type(values).__name__}")
    if size is not None and len(values) != size:
        raise ValueError(f"{operation} needs one element for each of the {size} ranks, not {len(values)}")
    return values
