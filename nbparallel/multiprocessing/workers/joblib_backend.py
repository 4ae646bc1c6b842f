"""A backend of joblib: the tasks of `Parallel`, and so scikit-learn's ``n_jobs``, run in an `Executor`."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import current_process
from types import ModuleType
from typing import Any, NamedTuple

import joblib
from joblib.parallel import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)

from nbparallel.multiprocessing.messages.call_copies import CallCopies
from nbparallel.multiprocessing.messages.exchange import join_household
from nbparallel.multiprocessing.starting.current_context import default_context
from nbparallel.multiprocessing.workers.executor import Executor


class ExecutorKind(NamedTuple):
    """What an executor was made for."""

    pid: int
    """Of its process: a forked child cannot use its parent's."""
    workers: int
    start_method: str
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    threads: int | None


def _specs() -> dict[str, Any]:
    modules = sys.modules.copy()  # another thread may import
    return {n: vars(module).get("__spec__") for n, module in modules.items() if type(module) is ModuleType}


class IdleExecutor:
    """The executor that no call uses: its workers have imported what the last call needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[ExecutorKind, Executor]] = []
        """At most one."""
        self._specs: dict[str, Any] = {}
        """Of this process's modules when it was kept; `importlib.reload` and ``%autoreload`` replace them."""

    def take(self, kind: ExecutorKind) -> Executor:
        """Return an executor, the kept one if it is of that kind; another kind is shut down."""
        with self._lock:
            kept, self._kept = self._kept, []
        for other, executor in kept:
            if other == kind and not vars(executor)["_broken"] and not self._reloaded():
                return executor
            if other.pid == kind.pid:
                executor.shutdown(wait=False)
        context = default_context().get_context(kind.start_method)
        return Executor(kind.workers, context, kind.initializer, kind.initargs, threads=kind.threads)

    def _reloaded(self) -> bool:
        """Return whether a module has been reloaded since, of which workers may have the old code."""
        now = _specs()
        return any(now.get(name, spec) is not spec for name, spec in self._specs.items())

    def keep(self, kind: ExecutorKind, executor: Executor) -> None:
        """Keep an executor for the next call, instead of another."""
        with self._lock:
            kept, self._kept = self._kept, [(kind, executor)]
            self._specs = _specs()
        for other, old in kept:
            if other.pid == kind.pid:
                old.shutdown(wait=False)


_idle = IdleExecutor()


class NbparallelBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """joblib's interface to an executor of ours.

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
        self._kind: ExecutorKind | None = None
        self._workers: Executor | None = None
        self._copies: CallCopies | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of workers for joblib's `n_jobs`; negative ones count from the CPUs down."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if n_jobs != 1 and current_process().daemon and join_household() is None:
            warnings.warn(
                "this process was forked by another library's pool, which would leave processes of "
                "nbparallel behind: the tasks run one after the other (n_jobs=1)",
                stacklevel=3,
            )
            return 1
        return n_jobs if n_jobs > 0 else max(joblib.cpu_count() + 1 + n_jobs, 1)

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
        self._kind = ExecutorKind(os.getpid(), n_jobs, self._method, initializer, initargs, threads)
        self._workers = _idle.take(self._kind)
        return n_jobs

    def start_call(self) -> None:
        """Begin a call of `Parallel`: what its tasks hold is copied once."""
        self._copies = CallCopies(())

    def stop_call(self) -> None:
        """End it."""
        self._copies = None

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Future[Any]], None] | None = None
    ) -> Future[Any]:
        """Send a batch of tasks; `callback` is called when it has ended."""
        if self._workers is None:
            raise RuntimeError("joblib has ended this call of Parallel already")
        future: Future[Any]
        try:
            future = self._workers._submit_copied(func, self._copies)
        except Exception as error:  # noqa: BLE001  joblib would take what it has sent for the next call's
            future = Future()
            future.set_exception(error)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """Return the results of a batch, or raise what a task raised."""
        return out.result()

    def terminate(self) -> None:
        """End a use of the workers, which are kept for the next."""
        executor, self._workers, self._copies = self._workers, None, None
        if executor is not None and self._kind is not None:
            _idle.keep(self._kind, executor)
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Stop all tasks under way; the workers stay."""
        waiting = getattr(self.parallel, "_ready_batches", None)
        while waiting is not None and not waiting.empty():
            waiting.get_nowait()  # joblib would take their results for the next call's
        executor = self._workers
        if executor is None:
            return
        executor._interrupt()
        if not ensure_ready:
            self.terminate()
        elif vars(executor)["_broken"] and self._kind is not None:
            self._workers = _idle.take(self._kind)
