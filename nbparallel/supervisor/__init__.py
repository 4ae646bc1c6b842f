"""The supervisor: the process that outlives the others and reports how each of them ended.

One death::

    rank exits ── SIGCHLD, pidfd ─> main._on_children
      children.reap              kill its process group, waitpid       -> ChildExit
      main._on_rank_exit         read what its socket still holds
        wire.control.write_death the death record: peers that wait raise PeerFailedError
        ledger.client_gone       end its holds: close, unlink, Idle or Drop to segments' creators
        DIED to the kernel       the session reports the error of the cell, and starts a rank when needed
      orphans.end                kill what user code on the rank had started
"""
