"""DataLoader: batches of a dataset, made here or by the workers of a pool, the same for any number of them.

::

    DataLoader ── SamplingPlan: which samples form batch n of an epoch
        │             │ indices                       `seeded`: what random numbers batch n sees
        │             v                                    │
        └─ an iteration: batches in turn <── BatchMaker.make(n) ── here, with 0 workers
                      ^                                    └── make_batch: a call of a pool
                      └── a window of calls; shared arrays arrive as handles
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import queue
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import TimeoutError as LibraryTimeoutError
from multiprocessing import current_process
from typing import Any

import numpy as np

from nbparallel.errors import WorkerDiedError
from nbparallel.multiprocessing.messages.exchange import join_household
from nbparallel.multiprocessing.messages.parcels import KeptObject
from nbparallel.multiprocessing.starting.interrupts import wait_in_slices
from nbparallel.multiprocessing.starting.process_state import default_context
from nbparallel.multiprocessing.workers.batches import (
    FAILED,
    Assignment,
    BatchMaker,
    EndOfStream,
    begin_worker,
    describe,
    make_batch,
)
from nbparallel.multiprocessing.workers.collation import default_collate
from nbparallel.multiprocessing.workers.worker_pool import CallPool, interrupt


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated: it has no ``__getitem__``, or is torch's of that kind.

    Raises
    ------
    TypeError
        It can be used in neither way.
    """
    torch = sys.modules.get("torch.utils.data")
    kind = getattr(torch, "IterableDataset", None)
    if kind is not None and isinstance(dataset, kind):
        return True
    if hasattr(dataset, "__getitem__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise TypeError(
        f"a dataset has __getitem__ and __len__, or __iter__; {type(dataset).__name__} has neither"
    )


class SamplingPlan:
    """What a loader was given for the choice of samples, checked.

    Raises
    ------
    ValueError
        Arguments exclude each other, or are out of range.
    TypeError
        The dataset has no length, and there is no sampler either.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        shuffle: bool,
        sampler: Iterable[Any] | None,
        batch_sampler: Iterable[Any] | None,
        drop_last: bool,
    ) -> None:
        self.stream = is_stream(dataset)
        if self.stream and (shuffle or sampler is not None or batch_sampler is not None):
            raise ValueError(
                "a dataset that can only be iterated has its own order: pass no shuffle, sampler or "
                "batch_sampler"
            )
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
        if sampler is not None and shuffle:
            raise ValueError("sampler and shuffle exclude each other: a sampler is an order")
        if batch_size is None and drop_last:
            raise ValueError("batch_size=None makes no batches, so that drop_last means nothing")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}; None: no batches")
        if not self.stream and sampler is None and batch_sampler is None and not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no length (__len__): pass a sampler, which yields indices"
            )
        self.dataset, self.batch_size, self.shuffle, self.drop_last = dataset, batch_size, shuffle, drop_last
        self.sampler, self.batch_sampler = sampler, batch_sampler

    def batches(self, seed: int, epoch: int) -> Iterator[Any]:
        """Yield the indices of each batch: a list, or one index without batches."""
        if self.batch_sampler is not None:
            yield from map(list, self.batch_sampler)
            return
        indices: Iterable[Any]
        if self.sampler is not None:
            indices = self.sampler
        elif self.shuffle:
            order = np.random.default_rng(np.random.SeedSequence((seed, epoch)))
            indices = order.permutation(len(self.dataset)).tolist()
        else:
            indices = range(len(self.dataset))
        if self.batch_size is None:
            yield from indices
            return
        remaining = iter(indices)
        while batch := list(itertools.islice(remaining, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            yield batch

    def count(self) -> int:
        """Return the number of batches."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        samples: Any = self.dataset if self.sampler is None else self.sampler
        n = len(samples)
        if self.batch_size is None:
            return n
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)


def _kept(assignment: Assignment) -> Any:
    """Return a message for all workers; what holds locks or queues goes to each process as it starts."""
    try:
        return KeptObject(assignment)
    except (TypeError, RuntimeError):
        pass
    gc.collect()  # the error's traceback is a cycle, and holds frames: so the loader, and the user's
    return assignment


class _Lane:
    """A pool of a loader, and how many calls it has."""

    def __init__(self, pool: CallPool) -> None:
        self.pool, self.busy = pool, 0


class _Workers:
    """The workers of a loader, for one iteration at a time.

    Any worker makes any batch; but of a stream each reads on from where it is, and so has a pool of its own.
    """

    def __init__(self, context: Any, assignment: Assignment, num_workers: int, *, stream: bool) -> None:
        self._pid, self._member, self._context = os.getpid(), join_household(), context
        self.run = 0
        """Number of the present iteration."""
        seeds = np.random.SeedSequence(assignment.maker.seed).generate_state(num_workers, np.uint64).tolist()
        given: Any = assignment if context.get_start_method() == "fork" else _kept(assignment)
        self._given = given, num_workers, seeds
        self._sizes = [1] * num_workers if stream else [num_workers]
        self.lanes: list[_Lane] = []
        self.start(1)

    def start(self, lanes: int | None = None) -> None:
        """Start the workers of so many lanes, or of all, that have not been started."""
        given, *rest = self._given
        for size in self._sizes[len(self.lanes) : lanes]:
            initargs = given, len(self.lanes), *rest
            self.lanes.append(_Lane(CallPool("loader", size, begin_worker, initargs, None, self._context)))

    @property
    def usable(self) -> bool:
        """Whether this process has started them, under the supervisor that it still has."""
        if self._pid != os.getpid() or self._member is not join_household():
            return False
        return not any(lane.pool.failed for lane in self.lanes)

    def cancel(self) -> None:
        """Make void what they were to make; what one makes now is dropped."""
        for lane in self.lanes:
            lane.busy = 0
            interrupt(lane.pool, running=False)

    def end(self) -> None:
        """End them (idempotent)."""
        if self._pid == os.getpid():
            while self.lanes:  # a pool that is referred to keeps the names of its locks
                self.lanes.pop().pool.end()


class _Keeper:
    """Workers that wait for the next iteration: at most one group, if it is to be kept."""

    def __init__(self, *, persistent: bool) -> None:
        self.persistent = persistent
        self._idle: list[_Workers] = []

    def take(self) -> _Workers | None:
        """Return a group that waits and can be used."""
        while self._idle:
            group = self._idle.pop()
            if group.usable:
                return group
            group.end()
        return None

    def put_back(self, group: _Workers, *, end: bool = False) -> None:
        """Keep a group that has nothing to do any more, or end it."""
        # a pool ends its workers by a signal: what they keep would leave names of locks behind
        if end or not self.persistent or self._idle or not group.usable or current_process().daemon:
            group.end()
        else:
            group.cancel()
            self._idle.append(group)

    def close(self) -> None:
        """End what waits, and keep nothing any more."""
        self.persistent = False
        while self._idle:
            self._idle.pop().end()


class _LocalIteration(Iterator[Any]):
    """Batches that are made in this process, each when it is asked for."""

    def __init__(self, maker: BatchMaker, indices: Iterator[Any], epoch: int) -> None:
        self._maker = maker
        self._batches = enumerate(indices)
        maker.begin(epoch)

    def __next__(self) -> Any:
        """Return the next batch."""
        number, indices = next(self._batches)
        batch = self._maker.make(number, indices, restore=True)
        if batch is EndOfStream:
            self._batches = enumerate(iter(()))
            raise StopIteration
        return batch


class _WorkerIteration(Iterator[Any]):
    """Batches that workers make ahead.

    Parameters
    ----------
    group : _Workers
        Put back to its `keeper` at the end, however that comes.
    indices : iterator
        Of each batch; endless for a dataset that can only be iterated.
    """

    def __init__(
        self, loader: DataLoader, keeper: _Keeper, group: _Workers, indices: Iterator[Any], epoch: int
    ) -> None:
        self._group, self._epoch = group, epoch
        group.run += 1
        self._indices: Iterator[Any] = indices
        self._in_order, self._timeout, self._workers = loader.in_order, loader.timeout, loader.num_workers
        self._ahead = loader.prefetch_factor * loader.num_workers
        self._active = list(group.lanes)
        """Lanes that may be given calls."""
        self._stream = loader._plan.stream
        self._undecided = self._stream and loader.worker_init_fn is None
        """Whether the first batch says if the dataset gives each worker a part."""
        if self._undecided:  # by itself
            self._active, self._ahead = self._active[:1], 1
        elif self._stream:
            group.start()
            self._active = list(group.lanes)
        self._prefetch = loader.prefetch_factor
        self._given = self._taken = self._turn = 0
        self._makes: dict[int, Any] = {}
        """Number -> indices of what has not come."""
        self._came: queue.SimpleQueue[tuple[int, _Lane, bool, Any]] = queue.SimpleQueue()
        self._replies: dict[int, tuple[_Lane, bool, Any]] = {}
        # Last: it is called for a half-made object too, and at the end of the program.
        self._finalizer = weakref.finalize(self, keeper.put_back, group)
        self._keeper = keeper
        self._give()

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
        while True:
            try:
                self._give()
                if self._given == self._taken:
                    self._end()
                    raise StopIteration
                lane, succeeded, content = self._next_reply()
            except StopIteration:
                raise
            except BaseException:
                self._end(kill=True)
                raise
            kind, asked, batch = content if succeeded else (0, False, content)
            self._settle(lane, asked, knows=succeeded, end=batch is EndOfStream)
            if kind == FAILED or (not succeeded and self._is_lost(content)):
                self._end(kill=True)
            if not succeeded or kind == FAILED:
                try:
                    raise batch
                finally:
                    del content, batch  # the traceback holds this frame, and so the iteration
            if batch is not EndOfStream:
                with contextlib.suppress(WorkerDiedError):  # of the next one, which raises it
                    self._give()  # before the caller works on this one
                return batch

    def _is_lost(self, error: BaseException) -> bool:
        """Whether no further batch can come as it would have: a stream's place is gone with its worker."""
        return isinstance(error, WorkerDiedError) and (self._stream or not self._group.usable)

    def _end(self, *, kill: bool = False) -> None:
        self._active.clear()
        self._replies.clear()
        self._indices, self._came = iter(()), queue.SimpleQueue()
        self._given = self._taken
        if self._finalizer.detach() is not None:
            self._keeper.put_back(self._group, end=kill)

    def _give(self) -> None:
        """Give calls to the workers, as many as they are to be ahead."""
        while self._active and self._given - self._taken < self._ahead:
            try:
                indices = next(self._indices)
            except StopIteration:
                self._active.clear()
                return
            lane = self._active[self._turn % len(self._active)]
            if not self._in_order:
                lane = min(self._active, key=lambda each: each.busy)
            number = self._given
            self._makes[number] = indices
            lane.busy += 1
            lane.pool.call(
                make_batch,
                (self._group.run, self._epoch, number, indices),
                {},
                partial(_arrive, self._came, number, lane),
                name=partial(describe, number, indices),
            )
            self._given += 1
            self._turn += 1

    def _next_reply(self) -> tuple[_Lane, bool, Any]:
        deadline = time.monotonic() + self._timeout if self._timeout else None
        while True:
            if self._replies and (not self._in_order or self._taken in self._replies):
                return self._replies.pop(self._taken if self._in_order else next(iter(self._replies)))
            if not wait_in_slices(self._receive, None if deadline is None else deadline - time.monotonic()):
                made = ", ".join(
                    describe(*one) for one in itertools.islice(self._makes.items(), self._workers)
                )
                raise LibraryTimeoutError(
                    f"no batch came within timeout={self._timeout:g} s: {made}; its workers were ended"
                )

    def _receive(self, seconds: float | None) -> bool:
        with contextlib.suppress(queue.Empty):
            number, *reply = self._came.get(timeout=None if seconds is None else max(0.0, seconds))
            self._makes.pop(number, None)
            self._replies[number] = (reply[0], reply[1], reply[2])
            return True
        return False

    def _settle(self, lane: _Lane, asked: bool, *, knows: bool, end: bool) -> None:
        self._taken += 1
        lane.busy -= 1
        if end and lane in self._active:
            self._active.remove(lane)
        if self._undecided and knows:  # what a sample raises says nothing of parts
            self._undecided = False
            if asked:
                self._group.start()
                self._active += self._group.lanes[1:]
                self._turn = len(self._active) - len(self._group.lanes) + 1
            self._ahead = self._prefetch * max(1, len(self._active))


def _arrive(came: queue.SimpleQueue[Any], number: int, lane: _Lane, succeeded: bool, content: Any) -> None:
    came.put((number, lane, succeeded, content))


class DataLoader:
    """Batches of a dataset, made by worker processes ahead of their use.

    Each iteration is an epoch: every sample once.  Batches and their random numbers are equal for any
    number of workers, 0 included.

    Parameters
    ----------
    dataset : object with ``__getitem__`` and ``__len__``, or with ``__iter__``
        One of torch's, a list, or a class of the notebook.  Workers get a copy, whose large arrays are mapped
        copy-on-write; shared arrays are the same memory.
    batch_size : int or None
        Samples of a batch.  None: each sample comes by itself, as it is.
    shuffle : bool
        Whether each epoch has an order of its own.
    sampler : iterable of indices, optional
        The order, instead of `shuffle`.
    batch_sampler : iterable of lists of indices, optional
        The batches, instead of `batch_size`, `shuffle`, `sampler` and `drop_last`.
    num_workers : int
        Processes that make batches; 0: this one, when a batch is asked for.
    collate_fn : callable, optional
        Makes a batch of a list of samples, by default `default_collate`, whose large arrays and tensors
        arrive without a copy.
    drop_last : bool
        Whether to leave out a last batch that is not full.
    timeout : float
        Seconds to wait for a batch of a worker; 0: as long as all workers live.
    worker_init_fn : callable, optional
        Called with the worker's number when it starts.
    prefetch_factor : int
        Batches that each worker is ahead.
    persistent_workers : bool
        Whether workers wait for the next iteration.  They end with the loader, or by `close`.
    in_order : bool
        False: batches come as they are ready.
    seed : int, optional
        Orders and random numbers follow from it; by default another one in each loader.  Before each
        batch `random`, `numpy.random` and, where it is loaded, torch are seeded from it, the epoch and the
        number of the batch; with 0 workers what was there is put back.
    start_method : {"fork", "spawn", "forkserver"}, optional
        Of the workers, by default that of this package.

    Raises
    ------
    ValueError, TypeError
        Arguments exclude each other, or the dataset can be used in neither way.

    Notes
    -----
    Names and meanings are those of ``torch.utils.data.DataLoader``; torch is not needed.

    A dataset that can only be iterated is read by one worker, unless it asks for the worker's `id`
    (`get_worker_info`) before its first sample, or there is a `worker_init_fn`: then each reads its part, or
    everything if nothing gives it a part, as in torch.

    Leaving an iteration early makes the rest void: nothing of it stays in memory or goes on, but for a sample
    that is being made.  An interrupt while a batch is awaited, an ended worker and a time-out end the
    workers; the next iteration starts others.

    Examples
    --------
    >>> [batch.tolist() for batch in DataLoader(range(5), batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """

    dataset: Any
    batch_size: int | None
    drop_last: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Any] | None
    num_workers: int
    timeout: float
    worker_init_fn: Callable[[int], Any] | None
    collate_fn: Callable[[Any], Any] | None
    prefetch_factor: int
    persistent_workers: bool
    in_order: bool
    start_method: str | None
    seed: int

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        *,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
        in_order: bool = True,
        seed: int | None = None,
        start_method: str | None = None,
    ) -> None:
        self._plan = SamplingPlan(dataset, batch_size, shuffle, sampler, batch_sampler, drop_last)
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, not {num_workers}")
        if timeout < 0 or (timeout and not num_workers):
            raise ValueError(f"timeout must be 0 or more, and 0 without workers, not {timeout}")
        if prefetch_factor < 1:
            raise ValueError(f"prefetch_factor must be at least 1, not {prefetch_factor}")
        if seed is not None and seed < 0:
            raise ValueError(f"seed must be 0 or more, not {seed}")
        default_context().get_context(start_method)  # there is such a method
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.num_workers, self.timeout, self.worker_init_fn = num_workers, timeout, worker_init_fn
        self.collate_fn = default_collate if collate_fn is None and batch_size is not None else collate_fn
        self.prefetch_factor, self.persistent_workers = prefetch_factor, persistent_workers
        self.in_order, self.start_method = in_order, start_method
        self.seed = secrets.randbits(64) if seed is None else int(seed)
        self._epochs = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self._workers = _Keeper(persistent=self.persistent_workers)
        weakref.finalize(self, self._workers.close)

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises
        ------
        TypeError
            The dataset or the sampler has no length.
        """
        return self._plan.count()

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch.

        Raises
        ------
        UnpicklableError
            The dataset, `collate_fn` or `worker_init_fn` cannot be sent to workers.
        """
        epoch = next(self._epochs)
        plan = self._plan
        maker = BatchMaker(
            self.dataset, self.collate_fn, self.batch_size, self.drop_last, self.seed, plan.stream
        )
        indices = itertools.repeat(None) if plan.stream else plan.batches(self.seed, epoch)
        if not self.num_workers:
            return _LocalIteration(maker, indices, epoch)
        group = self._workers.take()
        if group is None:
            context = default_context().get_context(self.start_method).get_context()
            assignment = Assignment(maker, self.worker_init_fn)
            group = _Workers(context, assignment, self.num_workers, stream=plan.stream)
        return _WorkerIteration(self, self._workers, group, indices, epoch)

    def close(self) -> None:
        """End workers that wait for the next iteration, which starts others (idempotent)."""
        self._workers.close()
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process makes the same loader of, without workers."""
        state = self.__dict__.copy()
        del state["_workers"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
