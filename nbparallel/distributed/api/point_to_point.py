"""send and recv, as a rank calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.api.operation_base import GroupLike, OperationBase, Timeout, predefined, untraced
from nbparallel.distributed.arguments import (
    PROC_NULL,
    check_buffer,
    check_list,
    check_output,
    check_tag,
    deadline,
)
from nbparallel.distributed.collectives.group_collectives import GroupState
from nbparallel.distributed.point_to_point.matching import Receive
from nbparallel.distributed.runtime.call_site import receive_text
from nbparallel.distributed.work import Work

# P2POp: one send or receive of `batch_isend_irecv`, as in torch.


@dataclass(eq=False)
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
    peer: int | None = None
    group: GroupLike = None
    tag: int = 0
    group_peer: int | None = None

    def __post_init__(self) -> None:
        if getattr(self.op, "__name__", "") not in ("isend", "irecv"):
            raise ValueError(f"op must be isend or irecv, not {self.op!r}")
        if (self.peer is None) == (self.group_peer is None):
            raise ValueError("P2POp needs either peer or group_peer: pass one of them")


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
        timeout: Timeout = None,
    ) -> None:
        """Send a value to rank `dst`.

        The receiver's is its own: changes of `tensor` after this do not reach it.  Small values are
        buffered, so that two ranks may send to each other first.

        Parameters
        ----------
        tensor : array, tensor, number or any picklable object
            Shared arrays inside an object travel by handle, as the same memory.
        dst : int
            May be this rank itself.  `PROC_NULL`, the neighbour beyond the edge of a grid: nothing is sent.
        group : Group, optional
            Only a `recv` in the same group takes it; `dst` counts in the world all the same.
        tag : int
            Only a `recv` with the same tag takes it.
        group_dst : int, optional
            Instead of `dst`: its place in the group.
        view : bool
            Send where a shared array lies instead of its content: nothing is copied, and it arrives
            read-only (a tensor does not: torch has none).
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
            dst, word = self._peer(state, dst, group_dst, "dst"), state.word
        elif type(dst) is not int or not self._first <= dst < self._behind:
            dst = self._peer(self._group_table.world, dst, None, "dst")
        if type(tag) is not int or tag:
            tag = check_tag(tag)
        if dst is PROC_NULL:
            return
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
        return_source: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Receive a value: ``x = recv(src=0)``, or fill an array: ``recv(x, src=0)``.

        Parameters
        ----------
        tensor : array or tensor, optional
            Filled; dtype and shape must be those of what was sent.
        src : int, optional
            Rank of the sender; without it, or with None: any rank.  `PROC_NULL`, the neighbour beyond the
            edge of a grid: nothing is received, and an array stays as it is.
        group : Group, optional
            Take only what was sent in this group; `src` counts in the world all the same.
        group_src : int, optional
            Instead of `src`: its place in the group.
        return_source : bool
            Return the sender as well: ``x, source = recv(return_source=True)``.
        timeout : float, optional
            Seconds to wait.

        Returns
        -------
        value or int
            What was sent; with an array to fill, the rank that sent it; with `return_source` both.

        Raises
        ------
        CollectiveMismatchError
            The message does not fit the array: nothing was written, and it can still be received.
        DeadlockError
            The source has finished the cell, or waits for this rank itself.
        CollectiveTimeoutError
            The call timed out.
        """
        if (
            type(tensor) is np.ndarray
            and type(src) is int
            and type(tag) is int
            and group is None
            and group_src is None
            and timeout is None
            and self._first <= src < self._behind
            and tensor.flags.writeable
            and self._run_step(self._receiver.recv_short, tensor, src, tag)
        ):
            return (tensor, src) if return_source else src
        state = self._message_group(group)
        word, sources = (0, ()) if group is None else (state.word, state.ranks)
        buffer = check_buffer(tensor, src, tag) if tensor is not None else None
        is_plain = type(src) is int and not word and self._first <= src < self._behind
        if group_src is not None or not (src is None or is_plain):
            src = self._peer(state, src, group_src, "src")
        if type(tag) is not int or tag:
            tag = check_tag(tag)
        value, source = tensor, src
        if src is not PROC_NULL:
            value, source = self._run_step(
                self._receiver.recv, buffer, src, tag, deadline(timeout), word, sources
            )
        if return_source:
            return (value if tensor is None else tensor), source
        return value if tensor is None else source

    def _peer(self, state: GroupState, rank: Any, group_rank: int | None, name: str) -> int:
        """Return the other rank of a message, which the caller named."""
        if isinstance(rank, int | np.integer) and rank == PROC_NULL and group_rank is None:
            return PROC_NULL
        other = state.ranks[state.group_rank(rank, group_rank, name)]
        if self._across is None:
            self._context.place.check_reach([other], f"a message with {name}={other} in this cell")
        return other

    @predefined
    def sendrecv(
        self,
        tensor: Any,
        dst: int | None = None,
        src: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        *,
        recv_tag: int | None = None,
        output: Any = None,
        timeout: Timeout = None,
    ) -> Any:
        """Send one value and receive another: ``theirs = sendrecv(mine, dst=right, src=left)``.

        All ranks of a ring may call it together, whatever the size, and after ``strict_sync(True)`` as well.

        Parameters
        ----------
        tensor : array, number or any picklable object
            Sent to `dst`.
        dst, src : int
            The receiver, and the rank to receive from, by default any.  `PROC_NULL`: that half is left out.
        group : Group, optional
            Of both messages; `dst` and `src` count in the world all the same.
        tag, recv_tag : int
            Of what is sent, and of what is received: by default the same.
        output : array, optional
            Filled with what is received; dtype and shape must fit.  May be `tensor` itself.
        timeout : float, optional
            Seconds to wait for what is received.

        Returns
        -------
        value
            What was sent here: `output`, filled, if there is one.

        Raises
        ------
        CollectiveMismatchError, DeadlockError, PeerFailedError, CollectiveTimeoutError
            As `send` and `recv`.

        Notes
        -----
        Named after ``MPI_Sendrecv``.
        """
        state = self._message_group(group)
        receiver = self._peer(state, dst, None, "dst")
        sender = None if src is None else self._peer(state, src, None, "src")
        tag = check_tag(tag)
        expected = tag if recv_tag is None else check_tag(recv_tag, "recv_tag")
        if output is not None:
            check_output(output, "sendrecv")
        deadline(timeout)
        sent = self.isend(tensor, receiver, group, tag)
        received, _ = self.recv(output, sender, group, expected, return_source=True, timeout=timeout)
        sent.wait(timeout)
        return received

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
        work = Work("isend", self._context.call_site)
        if not strict or (dst == PROC_NULL and group_dst is None):
            work.ticket.waited = True  # it is completed: nothing is lost if `wait` is never called
            work.finish()
            return work
        state = self._group_table.world if group is None else self._group_table.find(group)
        push = self._sender.sent(work, state.ranks[state.group_rank(dst, group_dst, "dst")])
        return work.begin(lambda limit, wait: self._run_step(push, limit, wait))

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
            served in the order in which they were begun.  With `PROC_NULL` it is completed immediately.
        """
        state = self._message_group(group)
        buffer = check_buffer(tensor, src, tag) if tensor is not None else None
        if src is not None or group_src is not None:
            src = self._peer(state, src, group_src, "src")
        tag = check_tag(tag)
        work = Work(receive_text("irecv", src, tag), self._context.call_site)
        if src is PROC_NULL:
            work.ticket.waited = True
            work.finish(tensor, PROC_NULL)
            return work
        receive = Receive(work, tensor, buffer, src, tag, state.word, state.ranks)
        work.begin(lambda limit, wait: self._run_step(self._receiver.push, receive, limit, wait))
        self._tickets.add(work)
        return self._run_step(self._receiver.post, receive)

    def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[Work]:
        """Begin several sends and receives; returns their works, in order; none for an empty list.

        Raises
        ------
        TypeError
            The list holds something else; nothing was begun.
        """
        check_list(p2p_op_list, "batch_isend_irecv", "P2POp")
        for i, op in enumerate(p2p_op_list):
            if not isinstance(op, P2POp):
                raise TypeError(f"p2p_op_list[{i}] must be a P2POp, not {type(op).__name__}")
        works = []
        for op in p2p_op_list:
            name, side = ("isend", "dst") if op.op.__name__ == "isend" else ("irecv", "src")
            place = {side: op.peer, f"group_{side}": op.group_peer}
            works.append(getattr(self, name)(op.tensor, group=op.group, tag=op.tag, **place))
        return works

    @untraced
    def strict_sync(self, on: bool = True) -> None:
        """Make every `send` of this rank wait until its message was received, to show latent deadlocks."""
        self._sender.strict = bool(on)
