"""The door to the backend of joblib, which is loaded when it is asked for."""

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
