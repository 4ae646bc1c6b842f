"""The process that makes batches: what it is sent, what it answers, and `get_worker_info`."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from nbparallel.errors import ChannelClosedError
from nbparallel.multiprocessing.messages.exchange import current_membership
from nbparallel.multiprocessing.messages.kept_objects import KeptObject
from nbparallel.multiprocessing.messages.parcels import pickle_message, withdraw_parcel
from nbparallel.multiprocessing.starting.late_interrupts import begin_interrupts
from nbparallel.multiprocessing.starting.worker_threads import limit_threads
from nbparallel.multiprocessing.workers.loading.batch_maker import END, BatchMaker
from nbparallel.multiprocessing.workers.worker_failures import failure_of
from nbparallel.wire.system import ImportHook

_TORCH = "torch.utils.data._utils.worker"


class BatchTask(NamedTuple):
    """What a worker is to make; it travels as a plain tuple, which needs no pickling of ours.

    In place of a task there may be the number of a run: all its tasks are void, to be answered by
    `BatchOutcome.IDLE`.  None is the end.
    """

    run: int
    """Which iteration it is for, counted for these workers."""
    epoch: int
    number: int
    indices: Any


class BatchOutcome(Enum):
    """What became of a task."""

    BATCH = 1
    """`BatchReply.content` is the batch."""
    END = 2
    """The worker's part of the stream is at its end."""
    FAILED = 3
    """`BatchReply.content` is a `WorkerFailure`."""
    UNUSABLE = 4
    """The worker could not begin: a `WorkerFailure`, too."""
    IDLE = 5
    """No reply to an earlier task follows."""


class BatchReply(NamedTuple):
    """What a worker answers; it travels as a plain tuple."""

    number: int
    outcome: BatchOutcome | int
    """On its way it is a number."""
    splits: bool = False
    """Whether the dataset asked which worker this is: it reads its part of a stream only."""
    content: Any = None


class WorkerInfo:
    """What a dataset learns about the worker that it is used in, as in torch.

    Attributes
    ----------
    id : int
        0 … num_workers - 1.
    num_workers : int
    seed : int
        Of this worker.  Random numbers of a batch do not depend on it.
    dataset
        This worker's copy.
    """

    def __init__(self, identifier: int, num_workers: int, seed: int, dataset: Any) -> None:
        self._id, self.num_workers, self.seed, self.dataset = identifier, num_workers, seed, dataset
        self.asked = False
        """Whether the id was asked for."""

    @property
    def id(self) -> int:
        """Number of the worker."""
        self.asked = True
        return self._id

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self._id}, num_workers={self.num_workers}, seed={self.seed})"


_own: list[WorkerInfo] = []


def get_worker_info() -> Any:
    """Return the `WorkerInfo` of the loader's worker that this process is; None in any other process.

    A dataset that can only be iterated uses it to read its part: one of `num_workers`.

    Examples
    --------
    >>> get_worker_info() is None
    True
    """
    if _own:
        return _own[0]
    torch = sys.modules.get(_TORCH)
    return None if torch is None else torch.get_worker_info()


class Assignment(NamedTuple):
    """What a worker is given when it starts."""

    maker: BatchMaker
    worker_init_fn: Callable[[int], Any] | None


def run_worker(
    tasks: Any,
    replies: Any,
    given: Assignment | KeptObject,
    identifier: int,
    num_workers: int,
    seed: int,
    inherited: tuple[Any, ...],
) -> None:
    """Make batches until the tasks end.

    Parameters
    ----------
    tasks, replies : Connection
        One reads, one writes.
    given : Assignment or KeptObject
        What to make, or a message that holds it.
    inherited : tuple of Connection
        Ends of other processes that a fork has copied, to be closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that iterates ends this one
    begin_interrupts()
    for end in inherited:
        end.close()
    worker = _Worker(tasks, replies)
    try:
        assignment = given.open() if isinstance(given, KeptObject) else given
        info = WorkerInfo(identifier, num_workers, seed, assignment.maker.dataset)
        _own[:] = [info]
        limit_threads(1)  # as torch's own workers: there are as many processes as are wanted
        _tell_torch(info)
        if assignment.worker_init_fn is not None:
            assignment.worker_init_fn(identifier)
    except Exception as error:  # noqa: BLE001  whatever the user's code raises
        worker.answer(-1, BatchReply(-1, BatchOutcome.UNUSABLE, content=failure_of(error)))
        return
    worker.work(assignment.maker, info)


_present: dict[str, WorkerInfo] = {}


def _tell_torch(info: WorkerInfo) -> None:
    _present["info"] = info
    ImportHook(_TORCH, f"{__name__}.answer_torch").install()  # what asks it may also be what loads it


def answer_torch() -> None:
    """Set what torch's datasets ask for; called when torch is there."""
    vars(sys.modules[_TORCH])["_worker_info"] = _present["info"]


class _Worker:
    """Tasks are read in a thread of their own: so the other side can always write, and cancel them."""

    def __init__(self, tasks: Any, replies: Any) -> None:
        self._tasks, self._replies = tasks, replies
        self._queue: queue.SimpleQueue[BatchTask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while a reply is written, or tasks are made void."""
        self._void = 0
        """Iterations up to this one are void."""
        threading.Thread(target=self._read, name="loader tasks", daemon=True).start()

    def _read(self) -> None:
        try:
            while (task := self._tasks.recv()) is not None:
                if not isinstance(task, int):
                    self._queue.put(BatchTask(*task))
                    continue
                with self._lock:
                    self._void = task
                    self._replies.send((-1, BatchOutcome.IDLE.value))
        except (EOFError, OSError):
            pass  # the process that iterates has ended, or has closed the loader
        self._queue.put(None)

    def answer(self, run: int, reply: BatchReply) -> None:
        """Write a reply, unless it is void."""
        try:
            data, parcel = pickle_message(_plain(reply), self._replies.outbox)
        except Exception as error:  # noqa: BLE001  a batch that cannot be sent
            failed = reply._replace(outcome=BatchOutcome.FAILED, content=failure_of(error))
            data, parcel = pickle_message(_plain(failed), self._replies.outbox)
        try:
            with self._lock:
                if run != -1 and run <= self._void:
                    withdraw_parcel(parcel)
                else:
                    self._replies.send_bytes(data)
        except OSError:
            withdraw_parcel(parcel)  # no process reads it any more

    def work(self, maker: BatchMaker, info: WorkerInfo) -> None:
        """Make what is asked for, until there is nothing more."""
        made_for = -1
        while (task := self._next()) is not None:
            if task.run <= self._void:
                continue
            if task.run != made_for:
                made_for = task.run
                info.asked = False
                maker.begin(task.epoch, part=info._id)
            _tell_torch(info)
            self.answer(task.run, self._made(maker, info, task))

    def _made(self, maker: BatchMaker, info: WorkerInfo, task: BatchTask) -> BatchReply:
        try:
            batch = maker.make(task.number, task.indices, restore=False)
            if batch is END:
                return BatchReply(task.number, BatchOutcome.END, info.asked)
            return BatchReply(task.number, BatchOutcome.BATCH, info.asked, batch)
        except Exception as error:  # noqa: BLE001  whatever the dataset raises
            return BatchReply(task.number, BatchOutcome.FAILED, info.asked, failure_of(error))

    def _next(self) -> BatchTask | None:
        """Return the next task; memory that came back is freed while there is none for long."""
        member = current_membership()
        while True:
            seconds = None
            if member is not None:
                with contextlib.suppress(ChannelClosedError):  # what needs the supervisor will say so
                    seconds = member.store.tend()
            try:
                return self._queue.get(timeout=seconds)
            except queue.Empty:
                continue


def _plain(reply: BatchReply) -> tuple[Any, ...]:
    return (reply.number, BatchOutcome(reply.outcome).value, *reply[2:])
