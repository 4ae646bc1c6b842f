"""One cell, from its source to its results or its error.

::

    Session.run     SessionLock.hold; check_cell      the options and the source are right, or nothing starts
                    ElasticPool.ensure                every rank lives, or is started again
    TaskDispatcher  .prepare_cell ── NameDelivery     arrays into shared memory; what each rank lacks
                    .launch                           the task, pickled once, to every rank ──► engine.tasks
    TaskRun         .wait ◄─ RankPool.next_event      outcomes, questions, exits  ◄── EventLoop ◄── ranks
                      InterruptEscalation             user's interrupt, time-out, failure: SIGINT … SIGKILL
                    (output goes from the event loop to TaskOutput and the sink while the thread waits)
    TaskDispatcher  .finish ── outcomes               CellResult, or ParallelError and its kin
    Session         SessionLock.release               a PendingCell does the last three in its own thread
"""
