"""Supervises a session's processes: starts and reaps them, and cleans up the shared memory that they leave.

One death, with the sides of the kernel and of the other ranks::

    rank exits ── SIGCHLD, pidfd ─> main._on_children
      children.reap              kill its process group, waitpid       -> its exit code
      main._on_rank_exit         read what its socket still holds
        wire.control.write_death the death record: peers that wait raise PeerFailedError
        Clients.end
          Ledger.client_gone     end its holds: close, unlink, Idle or Drop to segments' creators
        DIED to the kernel
      orphans.end                kill what user code on the rank had started

    peers: runtime.peers         has_failed, first_failure: the operation raises, the rank reports its outcome
    kernel: SupervisorClient     DIED -> RankHandle.died: read what the rank had still sent and printed
      TaskRun._take              RankDeath: `outcomes.death_failure` makes it a RankDiedError
      ElasticPool._revive        before the next cell: its names count as not delivered; start a process, make
                                 a control segment; the survivors keep their variables
"""
