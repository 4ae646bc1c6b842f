"""The loader: batches of a dataset, made here or by processes, the same for any number of them.

::

    DataLoader ── sampling: which samples form batch n of an epoch
        │             │ indices                       seeding: what random numbers batch n sees
        │             v                                    │
        └─ iteration: batches in turn <── BatchMaker.make(n) ── here, with 0 workers
                      ^                                    └── loader_worker: in a process
                      └── worker_group: one pipe to each, one back; shared arrays as handles
"""
