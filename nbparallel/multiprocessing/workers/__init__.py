"""Workers: one engine, `worker_pool`, and what stands on it.

`worker_pipes` are the two pipes of a pool, at both ends, and what each worker notes before each step;
`worker_pool` decides what a death costs; `task_interrupts` stop tasks.  `executor`, `joblib_backend` and
`data_loader` hand calls to a `CallPool`, each with a future.  `spawned_processes` start, fail and end
together.  A worker's stderr is its parent's: nothing here reads it.
"""

from __future__ import annotations


def register_joblib() -> None:
    """Let joblib use processes of ours: ``joblib.parallel_config(backend="nbparallel")``.

    So does scikit-learn where it takes ``n_jobs``.  Functions and classes of ``__main__`` travel by value,
    shared arrays as the same memory; a private array of 256 KiB and more is copied once for a call of
    `joblib.Parallel`, and each task maps that copy copy-on-write.  A worker that dies is a `WorkerDiedError`.
    Workers are kept for the next call.  Its own tasks, workers of pools and ranks know it without a call.

    Raises
    ------
    ImportError
        joblib is not installed.
    """
    from joblib.parallel import register_parallel_backend

    from nbparallel.multiprocessing.workers.joblib_backend import NbparallelBackend

    register_parallel_backend("nbparallel", NbparallelBackend)
