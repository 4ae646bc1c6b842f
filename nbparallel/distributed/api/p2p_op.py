"""P2POp: one send or receive of `batch_isend_irecv`, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbparallel.distributed.api.operation_base import GroupLike


class P2POp:
    """One send or receive for `batch_isend_irecv`.

    Parameters
    ----------
    op : function
        `isend` or `irecv`.
    tensor : array or value
        Sent, or the array to fill.
    peer : int
        The other rank; or `group_peer`, its place in the group.  `PROC_NULL`: nothing is sent or received.
    """

    op: Callable[..., Any]
    tensor: Any
    peer: int | None
    group: GroupLike
    tag: int

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if getattr(op, "__name__", "") not in ("isend", "irecv"):
            raise ValueError(f"op must be isend or irecv, not {op!r}")
        if peer is None and group_peer is None:
            raise ValueError("P2POp needs either peer or group_peer")
        if peer is not None and group_peer is not None:
            raise ValueError("peer and group_peer both name a rank: pass one of them")
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag
        self.group_peer = group_peer
