"""Iterations: the batches of one epoch in turn, made here or by workers."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from multiprocessing import TimeoutError as LibraryTimeoutError
from typing import Any, Protocol

from nbparallel.multiprocessing.workers.loading.batch_maker import END, BatchMaker, describe
from nbparallel.multiprocessing.workers.loading.loader_worker import BatchOutcome, BatchReply, BatchTask
from nbparallel.multiprocessing.workers.loading.worker_group import LoaderProcess, WorkerGroup
from nbparallel.multiprocessing.workers.worker_failures import raised


class LocalIteration(Iterator[Any]):
    """Batches that are made in this process, each when it is asked for."""

    def __init__(self, maker: BatchMaker, indices: Iterator[Any], epoch: int) -> None:
        self._maker = maker
        self._batches = enumerate(indices)
        maker.begin(epoch)

    def __next__(self) -> Any:
        """Return the next batch."""
        number, indices = next(self._batches)
        batch = self._maker.make(number, indices, restore=True)
        if batch is END:
            self._batches = enumerate(iter(()))
            raise StopIteration
        return batch


class Keeper(Protocol):
    """What lends workers to iterations."""

    def put_back(self, group: WorkerGroup) -> None:
        """Keep workers that have nothing to do, or end them."""


class _Lease:
    """An iteration's use of a group of workers, which ends once."""

    def __init__(self, keeper: Keeper, group: WorkerGroup) -> None:
        self._keeper, self._group = keeper, group
        self._ended = False

    def end(self, *, kill: bool = False) -> None:
        """Put the workers back, without anything that they have made or are to make (idempotent)."""
        if self._ended:
            return
        self._ended = True
        if kill or not self._group.usable or not self._group.cancel():
            self._group.end(kill=True)
        else:
            self._keeper.put_back(self._group)


class WorkerIteration(Iterator[Any]):
    """Batches that workers make ahead.

    Parameters
    ----------
    group : WorkerGroup
        Put back to its `keeper` at the end, however that comes.
    indices : iterator
        Of each batch; endless for a dataset that can only be iterated.
    prefetch : int
        Batches that each worker is ahead.
    undecided : bool
        Whether the first reply says if the dataset gives each worker a part, or the first one everything.
    """

    def __init__(
        self,
        keeper: Keeper,
        group: WorkerGroup,
        indices: Iterator[Any],
        epoch: int,
        *,
        prefetch: int,
        in_order: bool,
        timeout: float,
        undecided: bool,
    ) -> None:
        self._group, self._epoch = group, epoch
        group.run += 1
        self._indices: Iterator[Any] = indices
        self._in_order, self._timeout = in_order, timeout
        self._active = list(group.workers)
        """Workers that may be given tasks."""
        self._ahead = prefetch * len(self._active)
        if undecided:  # by itself
            self._active, self._ahead = self._active[:1], 1
        self._prefetch, self._undecided = prefetch, undecided
        self._given = 0
        """Tasks that were given."""
        self._taken = 0
        """Of them, how many were settled."""
        self._turn = 0
        self._replies: dict[int, tuple[LoaderProcess, BatchReply]] = {}
        self._lease = _Lease(keeper, group)
        # Last: it is called for a half-made object too, and at the end of the program.
        self._finalizer = weakref.finalize(self, self._lease.end)
        try:
            self._give()
        except BaseException:
            self._end(kill=True)
            raise

    def __next__(self) -> Any:
        """Return the next batch.

        Raises
        ------
        Exception
            What the dataset, the collation or `worker_init_fn` raised; its cause is the worker's traceback.
            After the first two the iteration can go on.
        WorkerDiedError
            A worker has ended; the message names the batch and its samples.
        multiprocessing.TimeoutError
            No batch came within the loader's `timeout`.
        """
        try:
            reply = self._next_reply()
        except BaseException:
            self._end(kill=True)
            raise
        if reply is None:
            self._end()
            raise StopIteration
        if reply.outcome is BatchOutcome.BATCH:
            return reply.content
        error = raised(reply.content)
        if reply.outcome is BatchOutcome.UNUSABLE:
            self._end(kill=True)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and so the iteration

    def _end(self, *, kill: bool = False) -> None:
        self._finalizer.detach()
        self._active.clear()
        self._replies.clear()
        self._indices = iter(())
        self._given = self._taken
        self._lease.end(kill=kill)

    def _next_reply(self) -> BatchReply | None:
        """Return the next reply, None behind the last."""
        deadline = time.monotonic() + self._timeout if self._timeout else None
        while True:
            self._give()
            if self._given == self._taken:
                return None
            found = self._take()
            if found is None:
                left = None if deadline is None else deadline - time.monotonic()
                self._receive(left)
                continue
            worker, reply = found
            self._settle(worker, reply)
            if reply.outcome is not BatchOutcome.END:
                self._give()  # before the caller works on this one
                return reply

    def _give(self) -> None:
        """Give tasks to the workers, as many as they are to be ahead."""
        while self._active and self._given - self._taken < self._ahead:
            try:
                indices = next(self._indices)
            except StopIteration:
                self._active.clear()
                return
            worker = self._active[self._turn % len(self._active)]
            if not self._in_order:
                worker = min(self._active, key=lambda each: len(each.outstanding))
            worker.assign(BatchTask(self._group.run, self._epoch, self._given, indices))
            self._given += 1
            self._turn += 1

    def _take(self) -> tuple[LoaderProcess, BatchReply] | None:
        if self._in_order:
            return self._replies.pop(self._taken, None)
        return self._replies.pop(next(iter(self._replies))) if self._replies else None

    def _receive(self, seconds: float | None) -> None:
        replies = self._group.wait(seconds)
        if not replies:
            self._time_out()
        for worker, reply in replies:
            if reply.outcome is BatchOutcome.UNUSABLE:
                reply = reply._replace(number=self._taken)
            self._replies[reply.number] = worker, reply

    def _time_out(self) -> None:
        busy = [
            f"worker {worker.number} makes {describe(*worker.outstanding[0][2:])}"
            for worker in self._group.workers
            if worker.outstanding
        ]
        raise LibraryTimeoutError(
            f"no batch came within timeout={self._timeout:g} s: {', '.join(busy)}. Its workers were ended"
        )

    def _settle(self, worker: LoaderProcess, reply: BatchReply) -> None:
        self._taken += 1
        if reply.outcome is BatchOutcome.END:
            with contextlib.suppress(ValueError):
                self._active.remove(worker)
        if self._undecided:
            self._undecided = False
            if reply.splits:
                self._active += self._group.workers[1:]
                self._turn = len(self._active) - len(self._group.workers) + 1
            self._ahead = self._prefetch * max(1, len(self._active))
