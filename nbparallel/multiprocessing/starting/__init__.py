"""How a process starts: forked, in a fresh interpreter, or from a server that forks.

`process_state` says what a process is given; the other modules are one start method each.
"""
