"""Process groups of processes that another program started: init_method, rendezvous, init_process_group."""
