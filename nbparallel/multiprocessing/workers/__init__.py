"""Workers: one engine, `worker_pool`, and what stands on it.

`worker_pipes` are the two pipes of a pool, at both ends, and what each worker notes before each step;
`worker_pool` decides what a death costs; `task_interrupts` stop tasks.  `executor`, `joblib_backend` and
`data_loader` hand calls to a `CallPool`, each with a future.  `spawned_processes` start, fail and end
together.  A worker's stderr is its parent's: nothing here reads it.
"""
