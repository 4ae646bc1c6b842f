"""DataLoader: batches of a dataset, in shared memory if workers make them."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nbparallel.multiprocessing.starting.current_context import default_context
from nbparallel.multiprocessing.workers.loading.batch_maker import BatchMaker
from nbparallel.multiprocessing.workers.loading.collation import default_collate
from nbparallel.multiprocessing.workers.loading.iteration import LocalIteration, WorkerIteration
from nbparallel.multiprocessing.workers.loading.loader_worker import Assignment
from nbparallel.multiprocessing.workers.loading.sampling import SamplingPlan
from nbparallel.multiprocessing.workers.loading.worker_group import WorkerGroup


class _Workers:
    """Workers that wait for the next iteration: at most one group, if it is to be kept."""

    def __init__(self, *, persistent: bool) -> None:
        self.persistent = persistent
        self._idle: list[WorkerGroup] = []

    def take(self) -> WorkerGroup | None:
        """Return a group that waits and can be used."""
        while self._idle:
            group = self._idle.pop()
            if group.usable and group.supervised:
                return group
            group.end(kill=True)
        return None

    def put_back(self, group: WorkerGroup) -> None:
        """Keep a group that has nothing to do, or end it."""
        if self.persistent and not self._idle:
            self._idle.append(group)
        else:
            group.end()

    def close(self) -> None:
        """End what waits, and keep nothing any more."""
        self.persistent = False
        while self._idle:
            self._idle.pop().end()


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
        self._workers = _Workers(persistent=self.persistent_workers)
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
            return LocalIteration(maker, indices, epoch)
        group = self._workers.take()
        if group is None:
            context = default_context().get_context(self.start_method)
            group = WorkerGroup(
                context.get_context(), Assignment(maker, self.worker_init_fn), self.num_workers
            )
        return WorkerIteration(
            self._workers,
            group,
            indices,
            epoch,
            prefetch=self.prefetch_factor,
            in_order=self.in_order,
            timeout=self.timeout,
            undecided=plan.stream and self.worker_init_fn is None,  # which may split it, as in torch
        )

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
