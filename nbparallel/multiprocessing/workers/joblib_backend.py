"""A backend of joblib: the tasks of `Parallel`, and so scikit-learn's ``n_jobs``, run in a pool of ours."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing import current_process
from types import ModuleType
from typing import Any, TypeAlias

from joblib._parallel_backends import PoolManagerMixin
from joblib.parallel import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)

from nbparallel.multiprocessing.messages.parcels import ArgumentCache, join_household
from nbparallel.multiprocessing.starting.process_state import default_context
from nbparallel.multiprocessing.workers.executor import CallPool, IdlePool

PoolKind: TypeAlias = tuple[int, str, Callable[..., object] | None, tuple[Any, ...], int | None]
"""What a pool was made for: workers, start method, initializer with arguments, threads of each worker."""


def _specs() -> dict[str, Any]:
    modules = sys.modules.copy()  # another thread may import
    return {n: vars(module).get("__spec__") for n, module in modules.items() if type(module) is ModuleType}


class _KeptPool(IdlePool):
    """The pool that no call uses: it has the modules that this process had then."""

    _specs: Mapping[str, Any] = {}
    """Of them when it was kept; `importlib.reload` and ``%autoreload`` replace them."""

    def take_or_make(self, kind: PoolKind) -> CallPool:
        """Return the kept pool if it is of that kind and has no old code, else another."""
        now = _specs()
        if any(now.get(name, spec) is not spec for name, spec in self._specs.items()):
            self.close()
        if (pool := self.take(kind)) is not None:
            return pool
        workers, method, initializer, initargs, threads = kind
        context = default_context().get_context(method).get_context()
        return CallPool("joblib backend", workers, initializer, initargs, context=context, threads=threads)

    def keep(self, pool: CallPool, kind: object = None) -> None:
        """Keep a pool for the next call, instead of another."""
        self._specs = _specs()
        super().keep(pool, kind)


_idle = _KeptPool()


class NbparallelBackend(PoolManagerMixin, AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """joblib's interface to a pool of ours.

    Parameters
    ----------
    start_method : {"forkserver", "spawn", "fork"}, optional
        Of its workers; by default forkserver, as joblib may call from any thread.
    initializer, initargs : callable, tuple
        Called in each worker before its first task.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True

    def __init__(self, *, start_method: str = "forkserver", **options: Any) -> None:
        super().__init__(**options)
        self._method = start_method
        self._kind: PoolKind | None = None
        self._engine: CallPool | None = None
        self._copies: ArgumentCache | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of workers for joblib's `n_jobs`; negative ones count from the CPUs down."""
        found: int = super().effective_n_jobs(n_jobs)
        if found != 1 and current_process().daemon and join_household() is None:
            warnings.warn(
                "this process was forked by another library's pool, which would leave processes of "
                "nbparallel behind: the tasks run one after the other (n_jobs=1)",
                stacklevel=3,
            )
            return 1
        return found

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        prefer: str | None = None,
        require: str | None = None,
        **options: Any,
    ) -> int:
        """Get the workers ready; return how many."""
        n_jobs = self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        options = {**self.backend_kwargs, **options}
        initializer, initargs = options.get("initializer"), tuple(options.get("initargs", ()))
        threads = self.inner_max_num_threads
        self._kind = n_jobs, self._method, initializer, initargs, threads
        return n_jobs

    def start_call(self) -> None:
        """Begin a call of `Parallel`: what its tasks hold is copied once."""
        self._copies = ArgumentCache(())

    def stop_call(self) -> None:
        """End it."""
        self._copies = None

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], object] | None = None) -> None:
        """Send a batch of tasks; `callback` is called when it has ended."""
        if self._kind is None:
            raise RuntimeError("joblib has ended this call of Parallel already")
        batch = Future[Any]()
        if callback is not None:
            batch.add_done_callback(callback)
        try:  # not in `configure`: what fails there leaves `Parallel` as one that runs
            if self._engine is None:
                self._engine = _idle.take_or_make(self._kind)
                self._engine.count_ahead(self._ahead)
            self._engine.call(func, (), {}, batch, copies=self._copies)
        except Exception as error:  # noqa: BLE001  joblib would take what it has sent for the next call's
            batch.set_exception(error)

    def _ahead(self) -> int | None:
        """Return how many tasks joblib has not sent; it has no length of a generator before its end."""
        whole, sent = getattr(self.parallel, "n_tasks", None), self.parallel.n_dispatched_tasks
        return 0 if self.parallel._original_iterator is None else None if whole is None else whole - sent

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """Return the results of a batch, or raise what a task raised."""
        return out.result()

    def terminate(self) -> None:
        """End a use of the workers, which are kept for the next."""
        pool, kind = self._engine, self._kind
        self._engine = self._kind = self._copies = None
        if pool is not None:
            pool.count_ahead(None)
            _idle.keep(pool, kind)
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Stop all tasks under way; the workers stay."""
        waiting = getattr(self.parallel, "_ready_batches", None)
        while waiting is not None and not waiting.empty():
            waiting.get_nowait()  # joblib would take their results for the next call's
        if self._engine is None:
            return
        self._engine.interrupt()
        if not ensure_ready:
            self.terminate()
        elif self._engine.failed is not None and self._kind is not None:
            self._engine = _idle.take_or_make(self._kind)
