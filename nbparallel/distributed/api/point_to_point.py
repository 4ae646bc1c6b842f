"""send and recv, as a rank calls them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.api._operation import GroupLike, OperationBase, predefined, untraced
from nbparallel.distributed.arguments import check_buffer, check_tag, deadline
from nbparallel.distributed.point_to_point.matching import Receive
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.work import Work


class P2POp:
    """One send or receive for `batch_isend_irecv`.

    Parameters
    ----------
    op : function
        `isend` or `irecv`.
    tensor : array or value
        Sent, or the array to fill.
    peer : int
        The other rank; or `group_peer`, its place in the group.
    """

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
        if (peer is None) == (group_peer is None):
            raise ValueError("P2POp needs either peer or group_peer")
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag
        self.group_peer = group_peer


class PointToPoint(OperationBase):
    """Operations between two ranks."""

    @predefined
    def send(
        self,
        tensor: Any,
        dst: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_dst: int | None = None,
        *,
        view: bool = False,
        timeout: float | datetime.timedelta | None = None,
    ) -> None:
        """Send a value to rank `dst`.

        The receiver's is its own: changes of `tensor` after this do not reach it.  Small values are
        buffered, so that two ranks may send to each other first.

        Parameters
        ----------
        tensor : array, number or any picklable object
            Shared arrays inside an object travel by handle, as the same memory.
        dst : int
            May be this rank itself.
        group : Group, optional
            Only a `recv` in the same group takes it; `dst` counts in the world all the same.
        tag : int
            Only a `recv` with the same tag takes it.
        group_dst : int, optional
            Instead of `dst`: its place in the group.
        view : bool
            Send where a shared array lies instead of its content: nothing is copied, and it arrives
            read-only.
        timeout : float, optional
            Seconds to wait for room.

        Raises
        ------
        ValueError, TypeError
            Wrong rank or tag; nothing was sent.
        PeerFailedError, DeadlockError
            The receiver cannot make room any more.
        """
        context = self._context
        word = 0
        if group is not None or group_dst is not None or not context.ready:
            state = self._message_group(group)
            dst, word = state.ranks[state.group_rank(dst, group_dst, "dst")], state.word
        elif type(dst) is not int or not 0 <= dst < self.world_size:
            dst = self._group_table.world.group_rank(dst, None, "dst")
        if type(tag) is not int or tag:
            tag = check_tag(tag)
        context.ready = False
        try:
            if (
                type(tensor) is not np.ndarray
                or word
                or view
                or not self._sender.send_short(tensor, dst, tag)
            ):
                limit = None if timeout is None else deadline(timeout)
                self._sender.send(tensor, dst, tag, view=view, deadline_ns=limit, group=word)
            context.ready = True
        except BaseException as error:
            context.failed(error)
            raise

    @predefined
    def recv(
        self,
        tensor: Any = None,
        src: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_src: int | None = None,
        *,
        timeout: float | datetime.timedelta | None = None,
    ) -> Any:
        """Receive a value: ``x = recv(src=0)``, or fill an array: ``recv(x, src=0)``.

        Parameters
        ----------
        tensor : array, optional
            Filled; dtype and shape must be those of what was sent.
        src : int, optional
            Rank of the sender; None: any rank.
        group : Group, optional
            Take only what was sent in this group; `src` counts in the world all the same.
        group_src : int, optional
            Instead of `src`: its place in the group.
        timeout : float, optional
            Seconds to wait.

        Returns
        -------
        value or int
            What was sent; with an array to fill, the rank that sent it.

        Raises
        ------
        CollectiveMismatchError
            The message does not fit the array: nothing was written, and it can still be received.
        DeadlockError
            The source has finished the cell, or waits for this rank itself.
        CollectiveTimeoutError
            The time-out ran out.
        """
        if (
            type(tensor) is np.ndarray
            and type(src) is int
            and type(tag) is int
            and group is None
            and group_src is None
            and timeout is None
            and 0 <= src < self.world_size
            and self._context.ready
            and tensor.flags.writeable
            and self._receive_short(tensor, src, tag)
        ):
            return src
        value, source = self._receive(tensor, src, group, tag, group_src, timeout)
        return value if tensor is None else source

    def _receive_short(self, tensor: AnyArray, src: int, tag: int) -> bool:
        context = self._context
        context.ready = False
        try:
            received = self._receiver.recv_short(tensor, src, tag)
            context.ready = True
        except BaseException as error:
            context.failed(error)
            raise
        return received

    def _receive(
        self,
        tensor: Any,
        src: int | None,
        group: GroupLike,
        tag: int,
        group_src: int | None,
        timeout: float | datetime.timedelta | None,
    ) -> tuple[Any, int]:
        context = self._context
        word = 0
        sources: Sequence[int] = ()
        state = self._group_table.world
        if group is not None or not context.ready:
            state = self._message_group(group)
            word, sources = state.word, state.ranks
        buffer = check_buffer(tensor) if tensor is not None else None
        if group_src is not None or (
            src is not None and (type(src) is not int or word or not 0 <= src < self.world_size)
        ):
            src = state.ranks[state.group_rank(src, group_src, "src")]
        if type(tag) is not int or tag:
            tag = check_tag(tag)
        context.ready = False
        try:
            limit = None if timeout is None else deadline(timeout)
            found = self._receiver.recv(buffer, src, tag, limit, group=word, sources=sources)
            context.ready = True
        except BaseException as error:
            context.failed(error)
            raise
        return found

    @predefined
    def isend(
        self,
        tensor: Any,
        dst: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_dst: int | None = None,
        *,
        view: bool = False,
    ) -> Work:
        """Send a value without waiting for its `recv`; parameters and errors as `send`.

        The value is buffered: `tensor` may be changed, and the work is completed, when this returns.
        After ``strict_sync(True)`` it is completed when the message was received.
        """
        strict, self._sender.strict = self._sender.strict, False
        try:
            self.send(tensor, dst, group, tag, group_dst=group_dst, view=view)
        finally:
            self._sender.strict = strict
        work = Work("isend", self._context.call_site.line())
        if not strict:
            work.ticket.waited = True  # it is completed: nothing is lost if `wait` is never called
            work.finish()
            return work
        state = self._group_table.world if group is None else self._group_table.find(group)
        push = self._sender.sent(work, state.ranks[state.group_rank(dst, group_dst, "dst")])
        return work.begin(lambda limit, wait: self._run_step(lambda: push(limit, wait)))

    @predefined
    def irecv(
        self,
        tensor: Any = None,
        src: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        """Begin to receive a value; parameters as `recv`.

        Returns
        -------
        Work
            Its `result` is the value, or `tensor`, filled; `source_rank()` the sender.  Receives are
            served in the order in which they were begun.
        """
        state = self._message_group(group)
        buffer = check_buffer(tensor) if tensor is not None else None
        if src is not None or group_src is not None:
            src = state.ranks[state.group_rank(src, group_src, "src")]
        tag = check_tag(tag)
        shown = f"irecv(src={src}{f', tag={tag}' if tag else ''})"
        work = Work(shown, self._context.call_site.line())
        receive = Receive(work, tensor, buffer, src, tag, state.word, state.ranks)
        work.begin(lambda limit, wait: self._run_step(lambda: self._receiver.push(receive, limit, wait)))
        self._tickets.add(work)
        return self._run_step(lambda: self._receiver.post(receive))

    def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[Work]:
        """Begin several sends and receives; returns their works, in order.

        Raises
        ------
        TypeError, ValueError
            The list is empty or holds something else; nothing was begun.
        """
        if not isinstance(p2p_op_list, list | tuple):
            raise TypeError(f"p2p_op_list must be a list of P2POp, not {type(p2p_op_list).__name__}")
        for i, op in enumerate(p2p_op_list):
            if not isinstance(op, P2POp):
                raise TypeError(f"p2p_op_list[{i}] must be a P2POp, not {type(op).__name__}")
        if not p2p_op_list:
            raise ValueError("batch_isend_irecv needs at least one P2POp")
        works = []
        for op in p2p_op_list:
            name, side = ("isend", "dst") if op.op.__name__ == "isend" else ("irecv", "src")
            place = {side: op.peer} if op.group_peer is None else {f"group_{side}": op.group_peer}
            works.append(getattr(self, name)(op.tensor, group=op.group, tag=op.tag, **place))
        return works

    @untraced
    def strict_sync(self, on: bool = True) -> None:
        """Make every `send` of this rank wait until its message was received, to show latent deadlocks."""
        self._sender.strict = bool(on)

    def send_object_list(
        self,
        object_list: list[Any],
        dst: int | None = None,
        group: GroupLike = None,
        *,
        group_dst: int | None = None,
    ) -> None:
        """Send a list of any objects to rank `dst`, which must call `recv_object_list`."""
        if not isinstance(object_list, list):
            raise TypeError(f"send_object_list sends a list, not {type(object_list).__name__}")
        self.send(object_list, dst, group, group_dst=group_dst)

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: GroupLike = None,
        *,
        group_src: int | None = None,
    ) -> int:
        """Replace the elements of a list by those of the list that was sent; return the sender.

        Raises
        ------
        ValueError
            The list that came has another length; the elements stay as they were.
        """
        if not isinstance(object_list, list):
            raise TypeError(f"recv_object_list fills a list, not {type(object_list).__name__}")
        value, source = self._receive(None, src, group, 0, group_src, None)
        if not isinstance(value, list) or len(value) != len(object_list):
            sent = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
            raise ValueError(
                f"rank {source} sent {sent}, and the list to fill has {len(object_list)} elements"
            )
        object_list[:] = value
        return source
