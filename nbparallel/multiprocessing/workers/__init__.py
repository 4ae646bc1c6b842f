"""Workers: what a pool knows of each, what it does when one dies, and other ways to use them.

`worker_slots` is what a worker writes down before each step; `pool_streams` are the two pipes of a pool,
which can be replaced; `dead_workers` decides what a death costs.  `spawned_processes` start, fail and end
together, `executor` is that of `concurrent.futures`, `loading` prepares batches.  `manager_calls`
are the two ends of a call of a manager's object.
"""
