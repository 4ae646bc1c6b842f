"""How a process starts: forked, in a fresh interpreter, or from a server that forks.

`process_state` says what a process is given; `start_methods` has a class for each of the three.
"""
