"""The rank's side: template, main loop, shell, output.

A rank, from its fork to its exit::

    template.main          main.prepare: numpy, IPython, the operations, imported once before any fork;
                           then, for each rank, a FORK frame of the supervisor: fork twice ─ main.serve
    main._run              announce the pid to the supervisor, read the kernel's Configure, connect the Store
      Engine               streams, environment, shell, interrupts, predefined names
    main._loop             sleep until the kernel or the supervisor sends something; then one frame:
      Engine.handle          a new epoch            _join: Communicator
                             strategy, directory    kept for the next task
                             a question             inspection: answer it
                             a task                 _run ─ tasks.run_task
        tasks.run_task         begin_cell, arm interrupts, apply the notebook's names, run the code,
                               finish_cell, disarm, end_cell ─ TaskReport.outcome to the kernel
      Engine.release_idle_memory   Store.tend: release arrays that died; when to wake next
    main._run              the kernel asked it to exit, or has exited: flush, os._exit
"""
