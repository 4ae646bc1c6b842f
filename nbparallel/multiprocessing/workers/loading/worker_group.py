"""WorkerGroup: the processes of a loader, and a pipe to and from each."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import deque
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from nbparallel.errors import WorkerDiedError
from nbparallel.multiprocessing.messages.exchange import join_household
from nbparallel.multiprocessing.messages.kept_objects import KeptObject
from nbparallel.multiprocessing.workers.dead_workers import describe_end, died_error
from nbparallel.multiprocessing.workers.loading.batch_maker import describe
from nbparallel.multiprocessing.workers.loading.loader_worker import (
    Assignment,
    BatchOutcome,
    BatchReply,
    BatchTask,
    run_worker,
)
from nbparallel.multiprocessing.workers.pipe_reader import PipeReader
from nbparallel.multiprocessing.workers.worker_failures import failure_of

LOOK_SECONDS = 1.0
"""Between two looks at processes whose end woke nothing."""
END_SECONDS = 1.0
"""For workers to end by themselves, or to answer that they have nothing more to say."""
KILL_SECONDS = 5.0
"""For the system to end what was killed."""


class LoaderProcess:
    """One worker as the iterating process sees it."""

    def __init__(self, ctx: Any, number: int, given: Any, numbers: tuple[int, int], others: Any) -> None:
        tasks, self._tasks = ctx.Pipe(duplex=False)
        results, replies = ctx.Pipe(duplex=False)
        self.number = number
        self.outstanding: deque[BatchTask] = deque()
        """Tasks without a reply, the oldest first: that is the one that it works on."""
        forked = ctx.get_start_method() == "fork"
        inherited = (self._tasks, results, *others) if forked else ()
        try:
            self.process = ctx.Process(
                target=run_worker,
                args=(tasks, replies, given, number, *numbers, inherited),
                name=f"loader worker {number}",
                daemon=True,
            )
            self.process.interrupts_late = True
            self.process.start()
        except BaseException:
            self._tasks.close()
            results.close()
            raise
        finally:
            tasks.close()
            replies.close()
        self._unread = PipeReader(results)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The ends of its pipes that are here."""
        return self._tasks, self._unread.end

    @property
    def signals(self) -> list[Any]:
        """What becomes ready when there is something to read, or the process has ended."""
        return [self.process.sentinel] if self._unread.ended else [self._unread.end, self.process.sentinel]

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.exitcode is not None

    def assign(self, task: BatchTask) -> None:
        """Send a task; its death is found out when replies are read."""
        self.outstanding.append(task)
        with contextlib.suppress(BrokenPipeError):
            self._tasks.send(tuple(task))

    def tell(self, message: int | None) -> None:
        """Send what is no task."""
        with contextlib.suppress(OSError):
            self._tasks.send(message)

    def replies(self) -> list[BatchReply]:
        """Return the replies that have come."""
        found = []
        for message in self._unread.read():
            reply = _open(message, self.outstanding[0].number if self.outstanding else -1)
            if reply.outcome is not BatchOutcome.IDLE and self.outstanding:
                self.outstanding.popleft()
            found.append(reply)
        return found

    def error(self) -> WorkerDiedError:
        """Return the error about its end."""
        lost = ""
        if self.outstanding:
            more = len(self.outstanding) - 1
            lost = f" while it made {describe(*self.outstanding[0][2:])}"
            lost += f"; it was to make {more} more" if more else ""
        found = died_error(self.process, lost)
        found.args = (
            f"worker {self.number} of the loader (process {self.process.pid}) "
            f"{describe_end(self.process)}{lost}. The next iteration starts others",
        )
        found.task = describe(*self.outstanding[0][2:]) if self.outstanding else ""
        return found

    def discard(self) -> None:
        """Close the pipes and forget the process, which has ended."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.close()
        with contextlib.suppress(ValueError):
            self.process.close()


def _open(message: bytes, number: int) -> BatchReply:
    try:
        reply = BatchReply(*ForkingPickler.loads(message))
    except Exception as error:  # noqa: BLE001  it does not fit here, is gone, or what its own code raises
        error.add_note(f"batch {number} of the loader cannot be rebuilt here")
        failure = failure_of(error, ForkingPickler.dumps)  # sharing nothing: its supervisor may have ended
        return BatchReply(number, BatchOutcome.FAILED, content=failure)
    return reply._replace(outcome=BatchOutcome(reply.outcome))


def _kept(assignment: Assignment) -> Any:
    """Return a message for all workers; what holds locks or queues goes to each process as it starts."""
    try:
        return KeptObject(assignment)
    except (TypeError, RuntimeError):
        pass
    gc.collect()  # the error's traceback is a cycle, and holds frames: so the loader, and the user's
    return assignment


class WorkerGroup:
    """Workers of a loader, for one iteration at a time."""

    def __init__(self, ctx: Any, assignment: Assignment, num_workers: int) -> None:
        self._pid = os.getpid()
        self._member = join_household()
        self.run = 0
        """Number of the present iteration."""
        self.workers: list[LoaderProcess] = []
        given: Any = assignment
        if ctx.get_start_method() != "fork":
            given = _kept(assignment)
        seeds = np.random.SeedSequence(assignment.maker.seed).generate_state(num_workers, np.uint64)
        self._given = given
        try:
            for number in range(num_workers):
                others = [end for worker in self.workers for end in worker.ends]
                numbers = num_workers, int(seeds[number])
                self.workers.append(LoaderProcess(ctx, number, given, numbers, others))
        except BaseException:
            self.end(kill=True)
            raise

    @property
    def usable(self) -> bool:
        """Whether all workers live, and this process has started them."""
        return self._pid == os.getpid() and not any(worker.ended for worker in self.workers)

    @property
    def supervised(self) -> bool:
        """Whether the supervisor under which they were started is still that of this process."""
        return self._member is join_household()

    def wait(self, timeout: float | None) -> list[tuple[LoaderProcess, BatchReply]]:
        """Return replies; none if `timeout` seconds have passed.

        Raises
        ------
        WorkerDiedError
            A worker has ended, and every reply was returned that any had written before.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            ended = [worker for worker in self.workers if worker.ended]  # before its last replies are read
            found = [(worker, reply) for worker in self.workers for reply in worker.replies()]
            if found:
                return found
            if ended:
                raise ended[0].error()
            left = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return []
            connection.wait([signal for worker in self.workers for signal in worker.signals], left)

    def cancel(self) -> bool:
        """Make all tasks void and drop what was replied; return whether every worker has confirmed it."""
        waiting = [worker for worker in self.workers if worker.outstanding]
        for worker in waiting:
            worker.tell(self.run)
        deadline = time.monotonic() + END_SECONDS
        idle: set[int] = set()
        while len(idle) < len(waiting) and (left := deadline - time.monotonic()) > 0:
            try:
                replies = self.wait(left)
            except WorkerDiedError:
                return False
            idle |= {worker.number for worker, reply in replies if reply.outcome is BatchOutcome.IDLE}
        for worker in waiting:
            worker.outstanding.clear()
        return len(idle) == len(waiting)

    def end(self, *, kill: bool = False) -> None:
        """End the workers (idempotent); those that are busy for longer are killed."""
        if self._pid != os.getpid():
            return
        workers, self.workers = self.workers, []
        for worker in workers:
            if kill or worker.outstanding:
                worker.process.kill()
            else:
                worker.tell(None)
        deadline = time.monotonic() + END_SECONDS
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if not worker.ended:
                worker.process.kill()
                worker.process.join(KILL_SECONDS)
            worker.discard()
