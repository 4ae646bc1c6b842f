"""One cell, from its source to its results or its error.

::

    Session.run     check_cell; SessionLock.hold      the options and the source are right, or nothing starts
                    ElasticPool.ensure                every rank lives, or is started again
    TaskDispatcher  .prepare_cell ── NameDelivery     arrays into shared memory; what each rank lacks
                    .launch                           after a failure a new control segment; strategy and
                                                      directory if they changed; the task to every rank,
                                                      equal ones pickled once ──► engine.tasks
                    .finish
    TaskRun           .wait ◄─ RankPool.next_event    outcomes, questions, exits  ◄── EventLoop ◄── ranks
                        InterruptEscalation           user's interrupt, time-out, failure: SIGINT … SIGKILL
                        (output goes from the event loop to TaskOutput and the sink while the thread waits)
                      UnreceivedMessages                    messages that no rank received: dropped or kept
                      outcomes                        CellResult, or ParallelError and its kin
    Session.run     leaves SessionLock.hold           a PendingCell calls .finish in its own thread, and then
                                                      SessionLock.release
"""
