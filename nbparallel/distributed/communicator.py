"""Communicator: what a rank calls; checks arguments, then hands on to collectives and point_to_point."""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

import numpy as np

from nbparallel.distributed.collectives import Collectives
from nbparallel.distributed.diagnosis import look_for_deadlock
from nbparallel.distributed.member import Member
from nbparallel.distributed.point_to_point import PointToPoint, check_buffer
from nbparallel.sharing.store import Store
from nbparallel.wire.control import ControlView

_MAX_TAG = (1 << 63) - 1


class Communicator:
    """One rank's operations with the others, for one epoch.

    Parameters
    ----------
    control : int or ControlView
        The epoch's control segment; a descriptor stays the caller's, and is mapped here.
    store : Store
        This process's shared arrays.
    usable_cpus : int
        Processors that this session may use; with fewer than ranks nobody spins.

    Notes
    -----
    One operation at a time: a second thread gets a `RuntimeError`.  In a forked child every operation raises
    `ForkedRankError`.  After a failure the epoch is void: every further operation raises the first cause,
    until the engine makes a new communicator.
    """

    def __init__(
        self,
        control: int | ControlView,
        rank: int,
        world_size: int,
        store: Store,
        *,
        epoch: int,
        usable_cpus: int,
    ) -> None:
        self._view = control if isinstance(control, ControlView) else ControlView(control)
        self._owns_view = not isinstance(control, ControlView)
        self._member = Member(self._view, rank, world_size, store, epoch=epoch, usable_cpus=usable_cpus)
        self._member.diagnose = lambda wait: look_for_deadlock(self._member, wait)
        self._collectives = Collectives(self._member)
        self._messages = PointToPoint(self._member)
        self.rank, self.world_size, self.epoch = rank, world_size, epoch
        self._closed = False
        _living.add(self)

    # -- cells ---------------------------------------------------------------------------------------

    def begin_cell(self, cell: int, participants: tuple[int, ...], filename: str) -> None:
        """Take part in a cell.

        Parameters
        ----------
        cell : int
            Its number; grows from cell to cell.
        participants : tuple of int
            The ranks that it runs on.
        filename : str
            ``co_filename`` of the cell's code, by which an operation finds the line that called it.
        """
        self._messages.release()
        self._member.begin_cell(cell, participants, filename)

    def at_line(self, line: int) -> None:
        """Publish the line of the cell's statement that begins now; the error about a death names it."""
        self._member.at_line(line)

    def end_cell(self, failure: BaseException | None) -> None:
        """Leave the cell; with a failure, whoever waits for this rank raises `PeerFailedError`."""
        self._member.end_cell(failure)
        self._messages.release()

    @property
    def failed(self) -> bool:
        """Whether this epoch is void: the next cell needs a new communicator."""
        return self._member.cause is not None

    @property
    def wait_ns(self) -> int:
        """How long this rank has waited for others in this epoch."""
        return self._member.waiter.wait_ns

    def interrupt_pending(self) -> tuple[int, int]:
        """Return the kernel's interrupt word for this rank: (cell, sequence)."""
        return self._view.read_interrupt(self.rank)

    def release(self) -> None:
        """Let go of sent memory that receivers have taken over; the engine calls it when it is idle."""
        self._messages.release()
        self._member.forget_frames()

    def close(self) -> None:
        """Let go of everything; again is fine."""
        if self._closed:
            return
        self._closed = True
        self._messages.close()
        self._collectives.close()
        self._member.close()
        if self._owns_view:
            self._view.close()

    # -- operations ------------------------------------------------------------------------------------

    def send(
        self,
        tensor: Any,
        dst: int,
        group: object = None,
        tag: int = 0,
        *,
        view: bool = False,
        timeout: float | None = None,
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
        tag : int
            Only a `recv` with the same tag takes it.
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
        member = self._member
        if not member.ready or group is not None:
            self._refuse(world=False, group=group)
        if type(dst) is not int or not 0 <= dst < self.world_size:
            dst = self._check_rank(dst, "dst")
        if tag != 0 or type(tag) is not int:
            tag = self._check_tag(tag)
        member.ready = False
        try:
            self._messages.send(tensor, dst, tag, view=view, deadline_ns=self._deadline(timeout))
            member.ready = True
        except BaseException as error:
            member.failed(error)
            raise

    def recv(
        self,
        tensor: Any = None,
        src: int | None = None,
        group: object = None,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Receive a value: ``x = recv(src=0)``, or fill an array: ``recv(x, src=0)``.

        Parameters
        ----------
        tensor : array, optional
            Filled; dtype and shape must be those of what was sent.
        src : int, optional
            Whose message; None: anybody's.
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
        member = self._member
        if not member.ready or group is not None:
            self._refuse(world=False, group=group)
        buffer = check_buffer(tensor) if tensor is not None else None
        if src is not None and (type(src) is not int or not 0 <= src < self.world_size):
            src = self._check_rank(src, "src")
        if tag != 0 or type(tag) is not int:
            tag = self._check_tag(tag)
        member.ready = False
        try:
            value = self._messages.recv(buffer, src, tag, self._deadline(timeout))
            member.ready = True
        except BaseException as error:
            member.failed(error)
            raise
        return value

    def broadcast(
        self,
        tensor: Any,
        src: int = 0,
        group: object = None,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Give every rank what rank `src` has; all ranks must call it.

        Returns
        -------
        array or value
            On `src` its own.  Elsewhere: an array that was passed is filled and returned, and must have
            dtype and shape of the root's; for None (or a number) the root's value is returned as a new one.
        """
        member = self._member
        if not (member.ready and member.whole) or group is not None or async_op:
            self._refuse(world=True, group=group, async_op=async_op)
        if type(src) is not int or not 0 <= src < self.world_size:
            src = self._check_rank(src, "src")
        member.ready = False
        try:
            value = self._collectives.broadcast(tensor, src, self._deadline(timeout))
            member.ready = True
        except BaseException as error:
            member.failed(error)
            raise
        return value

    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        group: object = None,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Combine the values of all ranks, in rank order, and give every rank the result.

        Parameters
        ----------
        tensor : array or number
            An array is reduced in place, without a copy if every rank's lies in shared memory.  Python's
            ints stay exact, and numbers of different types may meet.
        op : str or ReduceOp
            ``sum avg product min max band bor bxor``.

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
        member = self._member
        if not (member.ready and member.whole) or group is not None or async_op:
            self._refuse(world=True, group=group, async_op=async_op)
        member.ready = False
        try:
            value = self._collectives.all_reduce(
                tensor, op, None if timeout is None else self._deadline(timeout)
            )
            member.ready = True
        except BaseException as error:
            member.failed(error)
            raise
        return value

    def barrier(self, group: object = None, async_op: bool = False, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        member = self._member
        if not (member.ready and member.whole) or group is not None or async_op:
            self._refuse(world=True, group=group, async_op=async_op)
        member.ready = False
        try:
            self._collectives.barrier(None if timeout is None else self._deadline(timeout))
            member.ready = True
        except BaseException as error:
            member.failed(error)
            raise

    def strict_sync(self, on: bool = True) -> None:
        """Make every `send` of this rank wait until its message was received, to show latent deadlocks."""
        self._messages.strict = bool(on)

    # -- arguments ---------------------------------------------------------------------------------------

    def _refuse(self, *, world: bool, group: object = None, async_op: bool = False) -> None:
        if group is not None:
            raise NotImplementedError("group= does not work yet: operations take part of the whole world")
        if async_op:
            raise NotImplementedError("async_op=True does not work yet: leave it out, the call then blocks")
        self._member.refuse(world=world)

    def _check_rank(self, rank: Any, name: str) -> int:
        if isinstance(rank, bool | np.bool_) or not isinstance(rank, int | np.integer):
            raise TypeError(
                f"{name} must be the number of a rank, an int, not {type(rank).__name__} {rank!r}"
            )
        if not 0 <= rank < self.world_size:
            ranks = "there is only rank 0" if self.world_size == 1 else f"ranks are 0-{self.world_size - 1}"
            raise ValueError(f"{name}={rank}: there is no such rank; {ranks}")
        return int(rank)

    def _check_tag(self, tag: Any) -> int:
        if isinstance(tag, bool | np.bool_) or not isinstance(tag, int | np.integer):
            raise TypeError(f"tag must be an int, not {type(tag).__name__}")
        if not 0 <= tag <= _MAX_TAG:
            raise ValueError(f"tag must be between 0 and 2**63 - 1, not {tag}")
        return int(tag)

    def _deadline(self, timeout: float | None) -> int | None:
        if timeout is None:
            return None
        if timeout < 0:
            raise ValueError(f"timeout is in seconds and must not be negative, not {timeout}")
        return time.monotonic_ns() + int(timeout * 1e9)

    def _forked(self) -> None:
        self._member.forked()


_living: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _after_fork() -> None:
    for communicator in list(_living):
        communicator._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
