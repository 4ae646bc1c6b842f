"""Communicator: what a rank calls, for one epoch; its operations stand in a file for each family."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from nbparallel.distributed.api.data_movement import DataMovement
from nbparallel.distributed.api.data_parallel import AssertSame, DataParallel
from nbparallel.distributed.api.groups import GridOperations, GroupOperations
from nbparallel.distributed.api.locks import Locks
from nbparallel.distributed.api.mpi_reductions import MpiReductions
from nbparallel.distributed.api.object_lists import ObjectLists
from nbparallel.distributed.api.operation_base import UNTRACED, OnOperation, WorldOperations
from nbparallel.distributed.api.point_to_point import PointToPoint
from nbparallel.distributed.api.reductions import Reductions
from nbparallel.distributed.collectives.direct import KeptBuffer
from nbparallel.distributed.collectives.group_collectives import GroupCollectives, GroupTable
from nbparallel.distributed.point_to_point.endpoints import Receiver, Sender
from nbparallel.distributed.point_to_point.packing import Envelope
from nbparallel.distributed.runtime.call_site import CallSite
from nbparallel.distributed.runtime.observers import Observers
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.supervisor_liveness import SupervisorLiveness
from nbparallel.distributed.slots.deadlock import DeadlockDetector
from nbparallel.distributed.slots.lock_table import LockTable
from nbparallel.distributed.slots.slot_area import world_area
from nbparallel.distributed.tracing import OperationTracer
from nbparallel.distributed.work import Tickets
from nbparallel.sharing.store import Store
from nbparallel.wire.control import ControlView
from nbparallel.wire.identity import WorldPlace

if TYPE_CHECKING:  # a tenth of what a script's import of the operations takes
    from nbparallel.wire.inspection import MessageReport
    from nbparallel.wire.messages import MessageSettlement, RankTimeline


class Communicator(
    PointToPoint,
    Reductions,
    MpiReductions,
    DataMovement,
    ObjectLists,
    AssertSame,
    DataParallel,
    GroupOperations,
    GridOperations,
    Locks,
):
    """One rank's operations with the others, for one epoch.

    Parameters
    ----------
    control : int or ControlView
        The epoch's control segment; a descriptor stays the caller's, and is mapped here.
    store : Store
        This process's shared arrays.
    usable_cpus : int
        Processors that this session may use; with fewer than ranks, no rank spins.
    liveness_check : SupervisorLiveness, optional
        Called in every slice of a wait; needed if ranks do not end with their supervisor.
    place : WorldPlace, optional
        Which ranks are on this machine; by default all.

    Notes
    -----
    One operation at a time: a second thread gets a `RuntimeError`.  In a forked child every operation raises
    `ForkedRankError`.  After a failure the epoch is invalid: every further operation raises the first cause,
    until the engine makes a new communicator.
    """

    locks: LockTable
    rank: int
    world_size: int
    epoch: int
    traced: ClassVar[tuple[str, ...]]
    """The operations that the timeline shows."""

    def __init__(
        self,
        control: int | ControlView,
        rank: int,
        world_size: int,
        store: Store,
        *,
        epoch: int,
        usable_cpus: int,
        liveness_check: SupervisorLiveness | None = None,
        place: WorldPlace | None = None,
    ) -> None:
        self._view = control if isinstance(control, ControlView) else ControlView(control)
        self._owns_view = not isinstance(control, ControlView)
        self._context = RankContext(
            self._view, rank, world_size, store, epoch=epoch, usable_cpus=usable_cpus, place=place
        )
        self._context.peers.liveness_check = liveness_check
        self._context.diagnose = DeadlockDetector(self._context).inspect
        here = self._context.place.ranks
        self._first, self._behind = here.start, here.stop
        buffer = KeptBuffer(self._context)
        self._world = GroupCollectives(self._context, world_area(self._view, rank, here), buffer)
        self._receiver = Receiver(self._context)
        self._sender = Sender(self._context, self._receiver.unexpected.take_in)
        self._group_table = GroupTable(self._context, self._sender, self._receiver, self._world, buffer)
        self._context.progress = self._progress
        self.locks = LockTable(self._context)
        self.rank, self.world_size, self.epoch = rank, world_size, epoch
        self._across: WorldOperations | None = None
        self._tickets = Tickets()
        self.observers: Observers = Observers(self)
        self._tracer: OperationTracer | None = None
        self._on_operation: OnOperation | None = None
        self.forgotten: list[str] = []
        """What the last cell has begun and never waited for."""
        self.messages: MessageReport | None = None
        """What was sent and not received when the last cell ended here; None: nothing."""
        self._operations_before = 0
        self.unreleased: list[str] = []
        """Locks that the last cell has not released."""
        self._closed = False
        self._at_end: list[tuple[Callable[[], None], Callable[[], None]]] = []
        _living.add(self)

    def record(self) -> None:
        """Note from the next cell on when its statements and operations begin and end (`timeline`)."""
        self._tracer = OperationTracer(TRACED, self.observers, self._context, self._world)
        self._on_operation = self._tracer
        self._context.waited = self._tracer.waited

    def timeline(self) -> RankTimeline | None:
        """Return the notes on the cell that has ended; None if nothing is noted."""
        return None if self._tracer is None else self._tracer.take()

    # -- cells ---------------------------------------------------------------------------------------

    def begin_cell(
        self,
        cell: int,
        participants: tuple[int, ...],
        filename: str,
        *,
        go_on: bool = False,
        fds: Sequence[int] = (),
    ) -> None:
        """Take part in a cell.

        Parameters
        ----------
        cell : int
            Its number; grows from cell to cell.
        participants : tuple of int
            The ranks that it runs on.
        filename : str
            ``co_filename`` of the cell's code, by which an operation finds the line that called it.
        go_on : bool
            A rank's failure only ends waits for that rank, not all.
        fds : sequence of int
            Came with the cell, and stay the caller's.
        """
        self.release()
        self.unreleased = []
        for collectives in self._group_table.opened():
            collectives.protocol.begin_cell()
        self._context.begin_cell(cell, participants, filename, go_on=go_on)
        self._close_across()
        self._across = self._context.place.operations(self._context, self._sender, self._receiver, fds)
        if self._tracer is not None:
            self._tracer.begin()

    def begin_items(self) -> None:
        """Refuse collectives until the cell ends: each rank calls a function for items of its own."""
        self._context.begin_items()

    def at_line(self, line: int, last_line: int = 0) -> None:
        """Publish the lines of the cell's statement that begins now; the error about a death names it."""
        self._context.at_line(line, last_line)
        if self._tracer is not None:
            self._tracer.at_line(line)

    def at_source(self, filename: str, label: str) -> None:
        """Find the lines that call operations in this file, which messages call `label`."""
        self._context.cell.filename = filename
        self._context.call_site = CallSite(filename, label)

    def finish_cell(self) -> None:
        """Release locks, finish the collectives that the cell has begun, and take in what has arrived.

        To be called when its code has ended well.

        Raises
        ------
        NbParallelError, KeyboardInterrupt
            As the operations themselves.
        """
        self.unreleased = self.locks.release_all()  # before it waits for ranks that may wait for a lock
        for finish, _ in self._at_end:
            finish()
        if self._context.ready:
            self._run_step(self._finish)

    def at_end(self, finish: Callable[[], None], drop: Callable[[], None]) -> None:
        """Call `finish` when this cell's code has ended well, and `drop` at the end of the cell."""
        if (finish, drop) not in self._at_end:
            self._at_end.append((finish, drop))

    def _finish(self) -> None:
        self._receiver.drain()
        for collectives in self._group_table.opened():
            collectives.pending.flush()

    def _progress(self) -> None:
        self._receiver.drain()
        for collectives in self._group_table.opened():
            collectives.pending.advance()

    def end_cell(self, failure: BaseException | None, *, could_receive: bool = True) -> None:
        """Leave the cell; with a failure, ranks that wait for this one raise `PeerFailedError`.

        `could_receive` is false where no code of the user ran: what a deadlock is to mention stays.
        """
        while self._at_end:
            self._at_end.pop()[1]()
        self._receiver.drop()
        for collectives in self._group_table.opened():
            collectives.pending.drop()
        self.unreleased += self.locks.release_all()
        self.forgotten = self._tickets.report()
        self._end_messages()
        if could_receive:
            self._context.remark = ""
        if self._tracer is not None:
            self._tracer.end()
        self._context.end_cell(failure)
        self._close_across()
        self.release()

    def _close_across(self) -> None:
        if self._across is not None:
            self._across.close()
            self._across = None

    def _end_messages(self) -> None:
        """Note what was sent and not received; quickly if this rank called nothing and nothing has come."""
        operations, unexpected = self._context.operations, self._receiver.unexpected
        if self.messages is None and operations == self._operations_before and not unexpected.count:
            return
        self._operations_before = operations
        destinations, (queued, late) = self._sender.unreceived(), unexpected.report()
        self.messages = None
        if destinations or queued or late:
            from nbparallel.wire.inspection import MessageReport  # few cells leave any

            self.messages = MessageReport(destinations, queued, late, self._context.call_site.label)

    def waiting_messages(self) -> tuple[Envelope, ...]:
        """Return the messages of earlier cells that have arrived and were not received."""
        return tuple(self._receiver.unexpected)

    def settle(self, settlement: MessageSettlement) -> None:
        """Drop or keep what the last cell has left; every rank that took part in it has ended it."""
        for source, position in settlement.dropped:
            self._receiver.settle(source, position, "")
        for source, position in settlement.kept:
            self._receiver.settle(source, position, settlement.cell)
        for destination in settlement.released:
            self._sender.forget(destination)
        self._context.remark = settlement.remark
        self.release()

    @property
    def failed(self) -> bool:
        """Whether this epoch is invalid: the next cell needs a new communicator."""
        return self._context.cause is not None

    @property
    def cell_ranks(self) -> tuple[int, ...]:
        """The ranks that the cell runs on."""
        return self._context.cell.ranks

    def spent(self) -> tuple[int, int]:
        """Return how long this rank has waited in this epoch, and moved data in this cell."""
        return self._context.waiter.wait_ns, 0 if self._tracer is None else self._tracer.moving_ns

    def release(self) -> None:
        """Release sent memory that receivers have taken over; the engine calls it when it is idle."""
        self._sender.release()
        self._receiver.release()
        self._context.forget_frames()
        for collectives in self._group_table.opened():
            collectives.exchange.release()

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a forked child of the rank, in which no operation is possible."""
        return self._context.forked

    def close(self) -> None:
        """Release all memory (idempotent)."""
        if self._closed:
            return
        self._closed = True
        self.observers.close()
        self._close_across()
        self._sender.close()
        self._receiver.close()
        self._group_table.close()
        self._context.close()
        if self._owns_view:
            self._view.close()

    def _forked(self) -> None:
        self._context = self._context.forked_copy()
        if self._tracer is not None:
            self._tracer.close()  # it writes words of the rank
            self._tracer = None


OPERATIONS: tuple[str, ...] = tuple(
    name for family in Communicator.__mro__[1:-1] for name in vars(family) if not name.startswith("_")
)
"""Every operation: the public methods of the families above."""
TRACED = Communicator.traced = tuple(name for name in OPERATIONS if name not in UNTRACED)
_living: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _after_fork() -> None:
    for communicator in list(_living):
        communicator._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
