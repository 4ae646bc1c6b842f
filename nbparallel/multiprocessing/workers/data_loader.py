"""DataLoader: batches of a dataset, made here or by the workers of a pool, the same for any number of them.

::

    DataLoader ── `_indices`: which samples form batch n of an epoch
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
import secrets
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from multiprocessing import TimeoutError as LibraryTimeoutError, current_process
from typing import Any

import numpy as np

from nbparallel.errors import WorkerDiedError
from nbparallel.multiprocessing.messages.parcels import SharedPayload
from nbparallel.multiprocessing.starting.process_state import default_context, wait_interruptibly
from nbparallel.multiprocessing.workers.batches import (
    BatchMaker,
    EndOfStream,
    begin_worker,
    default_collate,
    describe,
    make_batch,
)
from nbparallel.multiprocessing.workers.executor import CallPool, IdlePool


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


def _start_workers(
    context: Any, maker: BatchMaker, worker_init_fn: Callable[[int], Any] | None, size: int
) -> CallPool:
    """Start the workers of a loader, for one iteration at a time; any of them makes any batch.

    A stream has one worker: two would read it twice.
    """
    seeds = np.random.SeedSequence(maker.seed).generate_state(size, np.uint64).tolist()
    assignment = maker, worker_init_fn
    given: Any = assignment
    if context.get_start_method() != "fork":
        # one message for all; what holds locks or queues goes to each process as it starts
        with contextlib.suppress(TypeError, RuntimeError):
            given = SharedPayload(assignment)
        if given is assignment:
            gc.collect()  # the error's traceback is a cycle, and holds frames: so the loader
    pool = CallPool("loader", size, begin_worker, (given, size, seeds), None, context)
    pool.count_ahead(lambda: None)
    return pool


class _Keeper(IdlePool):
    """Workers that wait for the next iteration: at most one pool, if it is to be kept."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self._persistent = persistent

    def put_back(self, pool: CallPool, *, end: bool = False) -> None:
        """Keep workers that have nothing to do any more, or end them; what one makes now is dropped."""
        # a pool ends its workers by a signal: what they keep would leave names of locks behind
        if end or not self._persistent or not pool.usable or current_process().daemon:
            pool.end()
        else:
            pool.interrupt(running=False)
            self.keep(pool)

    def close(self) -> None:
        """End what waits, and keep nothing any more."""
        self._persistent = False
        super().close()


_runs = itertools.count()
"""Numbers of iterations."""


class _LocalIteration(Iterator[Any]):
    """Batches that are made in this process, each when it is asked for; one that fails is passed over."""

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
    pool : CallPool
        Put back to its `keeper` at the end, however that comes.
    indices : iterator
        Of each batch; endless for a dataset that can only be iterated.
    """

    def __init__(
        self, loader: DataLoader, keeper: _Keeper, pool: CallPool, indices: Iterator[Any], epoch: int
    ) -> None:
        self._engine, self._run, self._epoch = pool, next(_runs), epoch
        self._indices: Iterator[Any] = indices
        self._in_order, self._timeout = loader.in_order, loader.timeout
        self._stream, self._workers = loader._stream, loader._processes
        self._ahead = loader.prefetch_factor * self._workers
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[Any, Future[Any]]] = {}
        """Number -> indices and batch of what was given to the workers and has not been taken, as given."""
        # Last: it is called for a half-made object too, and at the end of the program.
        self._finalizer = weakref.finalize(self, keeper.put_back, pool)
        self._keeper = keeper
        self._give()

    def __next__(self) -> Any:
        """Return the next batch.

        Raises
        ------
        Exception
            What the dataset, the collation or `worker_init_fn` raised; its cause is the worker's traceback.
            The iteration can go on.
        WorkerDiedError
            A worker has ended; the message names the batch and its samples.
        multiprocessing.TimeoutError
            No batch came within the loader's `timeout`.
        """
        while True:
            try:
                self._give()
                if not self._calls:
                    self._end()
                    raise StopIteration
                _, batch = self._calls.pop(self._next_number())
            except StopIteration:
                raise
            except BaseException:
                self._end(kill=True)
                raise
            if (error := batch.exception()) is None:
                if batch.result() is EndOfStream:
                    self._indices = iter(())
                    continue
                with contextlib.suppress(WorkerDiedError):  # of the next one, which raises it
                    self._give()  # before the caller works on this one
                return batch.result()
            # no further batch can come as it would have: a stream's place is gone with its worker
            if isinstance(error, WorkerDiedError) and (self._stream or not self._engine.usable):
                self._end(kill=True)
            try:
                raise error
            finally:
                del error, batch  # the traceback holds this frame, and so the iteration

    def _end(self, *, kill: bool = False) -> None:
        self._indices = iter(())
        self._calls.clear()
        if self._finalizer.detach() is not None:
            self._keeper.put_back(self._engine, end=kill)

    def _give(self) -> None:
        """Give calls to the workers, as many as they are to be ahead."""
        for indices in itertools.islice(self._indices, self._ahead - len(self._calls)):
            number, batch = next(self._numbers), Future[Any]()
            args = self._run, self._epoch, number, indices
            self._engine.call(make_batch, args, {}, batch, name=partial(describe, number, indices))
            self._calls[number] = indices, batch

    def _next_number(self) -> int:
        """Wait until the next batch has come, and return its number."""
        wanted = {batch: number for number, (_, batch) in self._calls.items()}
        if self._in_order:
            wanted = dict(itertools.islice(wanted.items(), 1))

        def has_come(seconds: float | None) -> object:
            return wait(wanted, seconds, FIRST_COMPLETED).done

        if not wait_interruptibly(has_come, self._timeout or None):
            calls = self._calls.items()
            late = [describe(number, indices) for number, (indices, batch) in calls if not batch.done()]
            raise LibraryTimeoutError(
                f"no batch came within timeout={self._timeout:g} s: {', '.join(late[: self._workers])}; its "
                "workers were ended"
            )
        return next(number for batch, number in wanted.items() if batch.done())


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

    A dataset that can only be iterated has one worker, whatever `num_workers` says, and is read whole once:
    `get_worker_info` calls it one of one.

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
        self._stream = is_stream(dataset)
        if self._stream and (shuffle or sampler is not None or batch_sampler is not None):
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
        if not self._stream and sampler is None and batch_sampler is None and not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no length (__len__): pass a sampler, which yields indices"
            )
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
        self.sampler, self.batch_sampler, self._shuffle = sampler, batch_sampler, shuffle
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
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        samples: Any = self.dataset if self.sampler is None else self.sampler
        n = len(samples)
        if self.batch_size is None:
            return n
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def _indices(self, epoch: int) -> Iterator[Any]:
        """Yield the indices of each batch: a list, or one index without batches."""
        if self.batch_sampler is not None:
            yield from map(list, self.batch_sampler)
            return
        indices: Iterable[Any]
        if self.sampler is not None:
            indices = self.sampler
        elif self._shuffle:
            order = np.random.default_rng(np.random.SeedSequence((self.seed, epoch)))
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

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch.

        Raises
        ------
        UnpicklableError
            The dataset, `collate_fn` or `worker_init_fn` cannot be sent to workers.
        """
        epoch = next(self._epochs)
        maker = BatchMaker(
            self.dataset, self.collate_fn, self.batch_size, self.drop_last, self.seed, self._stream
        )
        indices = itertools.repeat(None) if self._stream else self._indices(epoch)
        if not self.num_workers:
            return _LocalIteration(maker, indices, epoch)
        pool = self._workers.take()
        if pool is None:
            context = default_context().get_context(self.start_method).get_context()
            pool = _start_workers(context, maker, self.worker_init_fn, self._processes)
        return _WorkerIteration(self, self._workers, pool, indices, epoch)

    @property
    def _processes(self) -> int:
        return 1 if self._stream else self.num_workers

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
